"""Branches and loops of a graph whose sizes vary are padded: one program for each bucket, whatever the padding holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_
from torch._higher_order_ops import scan, while_loop

from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import poison
from tests.tolerances import assert_close

SIZES = (5, 7, 8, 6, 13, 11, 16)
WIDTH = 3
torch.manual_seed(0)
WEIGHT = torch.randn(WIDTH, WIDTH)
Function = Callable[[torch.Tensor], Any]


def both(true: Callable[..., Any], false: Callable[..., Any]) -> Function:
    """A function that takes either branch, as the sum of its argument says."""
    return lambda x: torch.cond(x.sum() > 0, true, false, (x,))


def repeat(step: Callable[[torch.Tensor], torch.Tensor], times: int = 3) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        start = (torch.tensor(0), x)
        return while_loop(lambda i, x: i < times, lambda i, x: (i + 1, step(x)), start)[1]  # type: ignore[no-any-return]

    return run


def until_small(x: torch.Tensor) -> torch.Tensor:
    """The condition reads the sum of all elements."""
    return while_loop(lambda x: x.abs().sum() > 1, lambda x: (x * 0.5,), (x,))[0]  # type: ignore[no-any-return]


def with_more(x: torch.Tensor) -> Any:
    mean = x.mean(0)
    return while_loop(lambda i, a: i < 4, lambda i, a: (i + 1, a * 0.5 + mean), (torch.tensor(0), x))


def scan_places(x: torch.Tensor) -> Any:
    return scan(lambda c, y: (c + y, c * y), x[0] * 0, x)


def scan_columns(x: torch.Tensor) -> Any:
    """Each step reads a varying number of elements, the number of steps is fixed."""
    return scan(lambda c, y: (c + y.softmax(0), c.sum() + y), x[:, 0] * 0, x.t())


def scan_both(x: torch.Tensor) -> Any:
    """The number of steps and the size of each vary."""
    products = x @ x.t()
    return scan(lambda c, y: (c * 0.5 + y, (c * y).sum()), products[0] * 0, products)


def scan_factor(x: torch.Tensor) -> Any:
    scaled = x / x.shape[0]
    return scan(lambda c, y: (c + y * x.shape[0], y.sum() + c), x[0] * 0, scaled)


def map_rows(x: torch.Tensor) -> Any:
    products = x @ x.t()
    return map_(lambda row, x: (row.softmax(0) @ x).sum() + row, products, x)


def inner(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.mean() > 0, lambda x: x.exp(), lambda x: x - x.amax(0), (x,))  # type: ignore[no-any-return]


def nested(x: torch.Tensor) -> torch.Tensor:
    def fall(x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda x: x - x.mean(0))(x) + x.shape[0]

    return both(lambda x: inner(x) * 2, fall)(x)  # type: ignore[no-any-return]


def choose_by_size(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.shape[0] > 7, lambda x: x.softmax(0), lambda x: x.cumsum(0), (x,))  # type: ignore[no-any-return]


def sort_squares(x: torch.Tensor) -> Any:
    square = x @ x.t()
    return torch.cond(
        square.max() > 1,
        lambda y, x: (y.reshape(-1).sort()[0], x.t().reshape(-1) * 1),
        lambda y, x: (y.reshape(-1) * 1, x.reshape(-1) + 1),
        (square, x),
    )


CASES: dict[str, Function] = {
    "elementwise": both(lambda x: x.sin() * 2, lambda x: x.cos() - x),
    "sums": both(lambda x: x.sum(0), lambda x: x.mean(0)),
    "a softmax and a product": both(lambda x: x.softmax(0) @ WEIGHT, lambda x: (x @ WEIGHT).amax(0) + x),
    "several results": both(lambda x: (x * 2, x.sum(), x.t() + 1), lambda x: (x.exp(), x.mean(), x.t() * 3)),
    "merged dims": both(lambda x: x.flatten().cumsum(0), lambda x: x.t().flatten() * 2),
    "results laid out otherwise": both(lambda x: (x.t() + 1).reshape(-1), lambda x: x.reshape(-1) * 2),
    "sizes": both(lambda x: x / x.shape[0], lambda x: x * x.shape[0] + x.numel()),
    "a new tensor": both(lambda x: torch.ones(x.shape[0]) + x[:, 0], lambda x: torch.arange(x.shape[0]) * 0.5),
    "an operand": both(lambda x: x.clone(), lambda x: x * 2),
    "integers": both(lambda x: (x > 0).sum(0), lambda x: x.argmax(0)),
    "places": both(lambda x: x.argsort(0), lambda x: x.flip(0).argsort(0)),
    "concatenated": both(lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x * 2])),
    "parts": both(lambda x: x[1:] * 3, lambda x: (x * 2)[:-1] + 1),
    "a loop": repeat(lambda x: x.sin() * 2),
    "a loop with a mean": repeat(lambda x: x - x.mean(0)),
    "a loop with a norm": repeat(lambda x: nn.functional.layer_norm(x, (WIDTH,)) @ WEIGHT),
    "a loop with a softmax": repeat(lambda x: (x @ x.t()).softmax(-1) @ x),
    "a loop until": until_small,
    "a loop that reads more": with_more,
    "a loop over places": scan_places,
    "a loop over columns": scan_columns,
    "a loop over rows of a square": scan_both,
    "a loop with a size": scan_factor,
    "a map": map_rows,
    "behind a merge": lambda x: inner(x.flatten()).sum(),
    "in each other": nested,
    "a condition of a size": choose_by_size,
    "a sort of merged dims": sort_squares,
    "a loop over places in a branch": both(lambda x: scan_places(x)[1], lambda x: x * 2),
    "a branch, then a loop": lambda x: repeat(lambda x: x - x.mean(0))(inner(x)),
}


def check(function: Function, compiled: Function, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    for sign in (1, -1):
        x = torch.randn(size, WIDTH) * 0.3 + sign * 0.5
        for actual, expected in zip(*map(torch.utils._pytree.tree_leaves, (compiled(x), function(x))), strict=True):
            assert_close(actual, expected)
            assert actual.stride() == expected.stride()


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_branches_and_loops_are_padded(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    function, before = CASES[name], len(recorder.snapshot().exact_shapes)
    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    for number, size in enumerate(SIZES):
        if size == 6:
            with recorder.expect(compiles=0):  # 5, 7 and 8 have its bucket
                check(function, compiled, size, number)
        check(function, compiled, size, number)
    told = recorder.snapshot()
    assert told.exact_shapes[before:] == ()


TRAINED = ("elementwise", "sums", "a softmax and a product", "several results", "parts")
LOOPS = ("a loop over places", "a loop over columns", "a loop over rows of a square", "a map", "a condition of a size")


@pytest.mark.parametrize("name", [*TRAINED, *LOOPS])
def test_gradients(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    function, before = CASES[name], recorder.snapshot()
    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    for size in SIZES:
        for sign in (1, -1):
            x, gradients = (torch.randn(size, WIDTH) * 0.3 + sign * 0.5).requires_grad_(), []
            for call in (compiled, function):
                results = torch.utils._pytree.tree_leaves(call(x))
                loss = sum(each.square().sum() for each in results if each.requires_grad)
                gradients.append(torch.autograd.grad(loss, x)[0])
            assert_close(*gradients)
    told = recorder.snapshot()
    assert told.exact_shapes[len(before.exact_shapes) :] == ()
    assert told.eager_ops == before.eager_ops


@torch.no_grad()
def test_what_has_no_rule_in_a_branch_is_named(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(  # type: ignore[no-any-return]
            x.sum() > 0, lambda x: torch.linalg.lu_factor_ex(x)[0].sum(0), lambda x: x.mean(0), (x,)
        )

    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    for size in (5, 7):
        for sign in (1, -1):
            x = torch.randn(size, WIDTH) * 0.1 + sign
            assert_close(compiled(x), model(x))
    told = recorder.snapshot().exact_shapes[-1]
    assert "aten.linalg_lu_factor_ex.default cannot run on padded values" in told
    assert "test_padded_calls.py" in told
