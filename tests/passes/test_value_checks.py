"""What eager raises because of a value, a compiled call raises: with padded sizes, between good calls, and none of those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import poison
from tests.tolerances import assert_close

Case = tuple[Callable[..., Tensor], list[tuple[Any, ...]], list[tuple[Any, ...]]]
SMALL, LARGE = torch.randn(4, 5), torch.randn(6, 7)


def of(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def row(*numbers: int) -> Tensor:
    return of(*numbers)[None]


def attend(cache: Tensor, place: Tensor, new: Tensor) -> Tensor:
    return cache.index_copy(2, place, new).sum(2)


PLACES = [(SMALL, of(0, 3)), (LARGE, of(0, 5, 1))]
WRAPPED = [(SMALL, of(0, -4)), (LARGE, of(-6, 5, 1))]
BEYOND = [(SMALL, of(0, 4)), (LARGE, of(6, 2, 1))]
BELOW = [(SMALL, of(0, -1)), (LARGE, of(5, -7, 1))]
FAR_BELOW = [(SMALL, of(0, -5)), (LARGE, of(5, -7, 1))]
ROWS = [(SMALL, row(0, 3)), (LARGE, row(0, 5, 1))]
NO_ROWS = [(SMALL, row(0, 4)), (LARGE, row(6, 2, 1)), (SMALL, row(0, -1))]
NAN = float("nan")
UNPOOLED = [
    (torch.randn(1, 2, 3), of(0, 3, 5).expand(1, 2, 3)),
    (torch.randn(1, 2, 5), of(1, 2, 5, 7, 9).expand(1, 2, 5)),
]
BEYOND_POOL = [(UNPOOLED[0][0], of(0, 3, 6).expand(1, 2, 3)), (UNPOOLED[1][0], of(1, -1, 5, 7, 9).expand(1, 2, 5))]
HALF = [(SMALL.sigmoid(), SMALL.sigmoid()), (LARGE.sigmoid(), LARGE.sigmoid())]
CASES: dict[str, Case] = {
    "embedding": (lambda x, i: F.embedding(i, x), PLACES, [*BEYOND, *BELOW]),
    "embedding_bag": (lambda x, i: F.embedding_bag(i, x, of(0)), PLACES, [*BEYOND, *BELOW]),
    "offsets of bags": (
        lambda x, i: F.embedding_bag(of(0, 2, 1), x, i),
        [(SMALL, of(0, 2)), (LARGE, of(0, 1, 2))],
        [(SMALL, of(1, 2)), (LARGE, of(2, 2, 2))],
    ),
    "index": (lambda x, i: x[i], [*PLACES, *WRAPPED], [*BEYOND, *FAR_BELOW]),
    "index of two dims": (lambda x, i: x[i, i], [*PLACES, *WRAPPED], [*BEYOND, *FAR_BELOW]),
    "index_select": (lambda x, i: x.index_select(0, i), PLACES, [*BEYOND, *BELOW]),
    "index_add": (lambda x, i: x.index_add(0, i, x[: i.shape[0]]), PLACES, [*BEYOND, *BELOW]),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[: i.shape[0]]), PLACES, [*BEYOND, *BELOW]),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), [*PLACES, *WRAPPED], [*BEYOND, *FAR_BELOW]),
    "index_put": (lambda x, i: x.index_put((i,), x[0]), [*PLACES, *WRAPPED], [*BEYOND, *FAR_BELOW]),
    "take": (
        lambda x, i: x.take(i),
        [(SMALL, of(0, -20)), (LARGE, of(0, 41, 1))],
        [(SMALL, of(0, 20)), (LARGE, of(-43, 2, 1))],
    ),
    "put": (
        lambda x, i: x.put(i, x[0, : i.shape[0]]),
        [(SMALL, of(0, -20)), (LARGE, of(0, 41, 1))],
        [(SMALL, of(0, 20)), (LARGE, of(-43, 2, 1))],
    ),
    "gather": (lambda x, i: x.gather(0, i), ROWS, NO_ROWS),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), ROWS, NO_ROWS),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x), ROWS, NO_ROWS),
    "cross_entropy": (
        F.cross_entropy,
        [(SMALL, of(0, 4, -100, 1)), (LARGE, of(0, 5, 1, 6, 2, 1))],
        [(SMALL, of(0, 5, 1, 1)), (SMALL, of(0, -1, 1, 1)), (LARGE, of(7, 2, 1, 1, 1, 1))],
    ),
    "multi_margin_loss": (
        F.multi_margin_loss,
        [(SMALL, of(0, 4, 1, 2))],
        [(SMALL, of(0, 5, 1, 1)), (SMALL, of(0, -1, 1, 1))],
    ),
    "multilabel_margin_loss": (
        F.multilabel_margin_loss,
        [(SMALL, SMALL.long() * 0 - 1)],
        [(SMALL, SMALL.long() * 0 + 5), (SMALL, SMALL.long() * 0 - 2)],
    ),
    "binary_cross_entropy": (
        F.binary_cross_entropy,
        HALF,
        [(SMALL * 9, HALF[0][0]), (HALF[1][0], LARGE * 9), (SMALL * float("nan"), HALF[0][0])],
    ),
    "//": (
        lambda x, i: x.int() // i,
        [(SMALL, of(1, 3, 1, 1, 2)), (LARGE, of(1, 2, 3, 4, 5, 6, -7))],
        [(SMALL, of(0, 1, 1, 1, 2))],
    ),
    "%": (
        lambda x, i: x.int() % i,
        [(SMALL, of(1, 3, 1, 1, 2)), (LARGE, of(1, 2, 3, 4, 5, 6, -7))],
        [(SMALL, of(0, 1, 1, 1, 2))],
    ),
    "masked_scatter": (
        lambda x, source: x.masked_scatter(x > -9, source),
        [(SMALL, torch.randn(20)), (LARGE, torch.randn(50))],
        [(SMALL, torch.randn(19)), (LARGE, torch.randn(3))],
    ),
    "a cache": (
        attend,
        [
            (torch.randn(1, 2, 8, 3), of(7), torch.randn(1, 2, 1, 3)),
            (torch.randn(3, 2, 8, 3), of(0), torch.randn(3, 2, 1, 3)),
        ],
        [(torch.randn(1, 2, 8, 3), of(8), torch.randn(1, 2, 1, 3))],
    ),
    "bags that end late": (
        lambda x, i: F.embedding_bag(of(0, 2, 1), x, i, mode="sum"),
        [(SMALL, of(0, 3)), (LARGE, of(0, 1, 3))],
        [(SMALL, of(0, 4)), (LARGE, of(0, 1, 4))],
    ),
    "max_unpool1d": (lambda x, i: F.max_unpool1d(x, i, 2), UNPOOLED, BEYOND_POOL),
    "max_unpool2d": (
        lambda x, i: F.max_unpool2d(x[:, :, None], i[:, :, None], (1, 2), (1, 2)),
        UNPOOLED,
        BEYOND_POOL,
    ),
    "histc": (lambda x: torch.histc(x, 4), [(SMALL,), (LARGE,)], [(SMALL * NAN,), (LARGE / 0,)]),
    "histc of given ends": (lambda x: torch.histc(x, 4, -1, 1), [(SMALL,), (LARGE / 0,)], []),
    "masked_fill": (
        lambda x, value: x.to(torch.int8).masked_fill(x > 0, value),
        [(SMALL, torch.tensor(127)), (LARGE, torch.tensor(-128))],
        [(SMALL, torch.tensor(128)), (LARGE, torch.tensor(-129))],
    ),
    "masked_fill of bytes": (
        lambda x, value: x.to(torch.uint8).masked_fill(x > 0, value),
        [(SMALL, torch.tensor(255.0)), (LARGE, torch.tensor(0.5))],
        [(SMALL, torch.tensor(256.0)), (LARGE, torch.tensor(-0.5)), (SMALL, torch.tensor(NAN))],
    ),
    "masked_fill by narrower numbers": (
        lambda x, value: x.long().masked_fill(x > 0, value),
        [
            (SMALL, torch.tensor(n, dtype=d))
            for n in (3, 100)
            for d in (torch.int8, torch.uint8, torch.int32, torch.half)
        ],
        [(SMALL, torch.tensor(1e19)), (LARGE, torch.tensor(NAN))],
    ),
    "masked_fill of bytes with a sign by those without": (
        lambda x, value: x.to(torch.int8).masked_fill(x > 0, value),
        [(SMALL, torch.tensor(n, dtype=torch.uint8)) for n in (0, 3, 127)],
        [(SMALL, torch.tensor(n, dtype=torch.uint8)) for n in (128, 255)],
    ),
    "masked_fill of bytes by those with a sign": (
        lambda x, value: x.to(torch.uint8).masked_fill(x > 0, value),
        [(SMALL, torch.tensor(n, dtype=torch.int8)) for n in (0, 3, -128, 127)],
        [],
    ),
    "masked_fill of floats by whole numbers": (
        lambda x, value: x.half().masked_fill(x > 0, value),
        [
            (SMALL, torch.tensor(n, dtype=d))
            for n in (3, 100)
            for d in (torch.int8, torch.uint8, torch.int16, torch.int64)
        ],
        [(SMALL, torch.tensor(65520)), (LARGE, torch.tensor(-(1 << 40)))],
    ),
    "masked_fill of floats": (
        lambda x, value: x.half().masked_fill(x > 0, value),
        [(SMALL, torch.tensor(65504.0)), (LARGE, torch.tensor(float("-inf"))), (SMALL, torch.tensor(NAN))],
        [(SMALL, torch.tensor(65536.0)), (LARGE, torch.tensor(-1e9))],
    ),
    "segment_reduce": (
        lambda x, lengths: torch.segment_reduce(x.flatten(), "sum", lengths=lengths),
        [(SMALL, of(12, 8)), (LARGE, of(0, 40, 2))],
        [(SMALL, of(12, 9)), (LARGE, of(0, 40, 1)), (SMALL, of(21, -1))],
    ),
    "a broadcast mask": (
        lambda x, source: x.masked_scatter(x[0] > -9, source),
        [(SMALL, torch.randn(20)), (LARGE, torch.randn(50))],
        [(SMALL, torch.randn(19)), (LARGE, torch.randn(3))],
    ),
    "around an eager op": (lambda x, i: x[i].sum() + x.unique().sum() + x[:, i].sum(), PLACES, BEYOND),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_eager_refuses_raises(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    function, good, bad = CASES[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for args in good:
        assert_close(compiled(*args), function(*args))
    for args in bad:
        with pytest.raises(Exception) as eager:  # noqa: PT011 (any that eager raises)
            function(*args)
        with pytest.raises(eager.type):
            compiled(*args)
    assert_close(compiled(*good[0]), function(*good[0]))


CHANCES, WEIGHTS = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.5, 3.0, 1e30])
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor], list[Tensor]]] = {
    "bernoulli": (torch.bernoulli, [CHANCES, CHANCES.repeat(3)], [CHANCES + 1e-6, -CHANCES.repeat(3), CHANCES * NAN]),
    "bernoulli_": (lambda p: torch.empty_like(p).bernoulli_(p), [CHANCES, CHANCES.repeat(3)], [CHANCES + 1e-6]),
    "multinomial": (
        lambda p: torch.multinomial(p, 2),
        [WEIGHTS, WEIGHTS.repeat(3)],
        [WEIGHTS * NAN, -WEIGHTS.repeat(3), WEIGHTS * 0, WEIGHTS / 0],
    ),
    "multinomial of rows": (
        lambda p: torch.multinomial(p, 2, replacement=True),
        [WEIGHTS[None], WEIGHTS.repeat(3, 1)],
        [torch.stack([WEIGHTS, WEIGHTS * 0]), torch.stack([WEIGHTS, WEIGHTS, -WEIGHTS])],
    ),
    "normal": (lambda std: torch.normal(1.0, std), [WEIGHTS, WEIGHTS.repeat(3) / 0.0], [-WEIGHTS, WEIGHTS * NAN]),
    "normal of means": (lambda std: torch.normal(std, std), [WEIGHTS, WEIGHTS.repeat(3)], [-WEIGHTS, WEIGHTS * NAN]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_refuse_raises(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    function, good, bad = DRAWS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for given in (*good, *bad, good[0]):
        try:
            function(given)
        except RuntimeError as eager:
            with pytest.raises(type(eager)):
                compiled(given)
        else:
            compiled(given)


def test_draws_of_a_checkpoint_in_training(recorder: Recorder) -> None:
    def keep(x: Tensor) -> Tensor:
        return torch.bernoulli(x.detach() / 2) * x

    def step(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(keep, x, use_reentrant=False)  # type: ignore[no-any-return]

    compiled = torch.compile(step, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=2, eager_ops=0):
        for rows in (6, 7):
            x = torch.rand(rows, 3, requires_grad=True)
            result = compiled(x)
            result.sum().backward()
            assert torch.equal(x.grad != 0, result != 0)
    with pytest.raises(RuntimeError, match="not within 0 and 1"):
        compiled(torch.rand(6, 3, requires_grad=True) + 2)


def test_values_in_branches_are_not_checked(recorder: Recorder) -> None:
    def unpool(x: Tensor, i: Tensor) -> Tensor:
        return F.max_unpool1d(x, i, 2)

    def choose(x: Tensor, i: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, unpool, lambda x, i: -unpool(-x, i), (x, i))  # type: ignore[no-any-return]

    compiled = torch.compile(choose, backend="dynaxla")
    x, i = UNPOOLED[0]
    with recorder.expect(compiles=1, eager_ops=0):
        for given in (x, -x):
            assert_close(compiled(given, i), choose(given, i))


def test_unchecked_draws_leave_values_alone() -> None:
    compiled = torch.compile(torch.bernoulli, backend="dynaxla", options={"value_checks": False})
    assert compiled(CHANCES - 2).isnan().all()


def test_the_message_names_the_line() -> None:
    with pytest.raises(IndexError, match=r"dimension 0 is out of range \(aten.index.Tensor at .*test_value_checks.py"):
        torch.compile(lambda x, i: x[i], backend="dynaxla")(*BEYOND[0])


def test_integers_divided_by_plain_numbers_and_floats_are_not_checked(recorder: Recorder) -> None:
    def divide(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x // 2 + x % 3, x // y.shape[0], y / 0, y // 0.0

    compiled = torch.compile(divide, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=1, eager_ops=0):
        for size in (5, 6):
            x, y = torch.arange(size + 4), torch.randn(size)
            for mine, eager in zip(compiled(x, y), divide(x, y), strict=True):
                assert_close(mine, eager)


DIVIDED: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, k: x % k,
    lambda x, k: x // k,
    torch.fmod,
    lambda x, k: torch.div(x, k, rounding_mode="trunc"),
    lambda x, k: x.clone().remainder_(k),
    lambda x, k: x.clone().floor_divide_(k),
]


@pytest.mark.parametrize("divide", DIVIDED)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_divided_by_a_number_that_varies(
    divide: Callable[[Tensor, int], Tensor], dtype: torch.dtype, recorder: Recorder
) -> None:
    x = torch.arange(1, 6).to(dtype)
    compiled = torch.compile(divide, backend="dynaxla", dynamic=True)
    with recorder.expect(eager_ops=0):
        for k in (3, 2, 5):
            assert_close(compiled(x, k), divide(x, k))
        for function in (divide, compiled):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                function(x, 0)
        assert_close(compiled(x, 4), divide(x, 4))


def test_a_divisor_is_zero_in_the_dtype_that_divides() -> None:
    x = torch.arange(1, 6, dtype=torch.uint8)
    compiled = torch.compile(lambda x, k: x % k, backend="dynaxla", dynamic=True)
    assert compiled(x, 255).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, 256)


def test_whole_numbers_divided_by_a_size_or_a_number_that_was_read() -> None:
    by_size = torch.compile(lambda x: torch.arange(6) % (x.shape[0] - 3), backend="dynaxla", dynamic=True)
    assert by_size(torch.ones(5)).tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        by_size(torch.ones(3))
    read = torch.compile(lambda x, k: x // k.item(), backend="dynaxla")
    for k in (3, 2):
        assert read(torch.arange(6), torch.tensor(k)).tolist() == (torch.arange(6) // k).tolist()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        read(torch.arange(6), torch.tensor(0))


def test_whole_numbers_to_a_power_that_varies(recorder: Recorder) -> None:
    compiled = torch.compile(lambda x, k: x**k, backend="dynaxla", dynamic=True)
    x = torch.arange(1, 4)
    with recorder.expect(eager_ops=0):
        for k in (2, 3, 0):
            assert_close(compiled(x, k), x**k)
        with pytest.raises(RuntimeError, match="negative integer powers"):
            compiled(x, -1)
        assert_close(compiled(x.float(), -1), x.float() ** -1)


def test_a_training_step_checks_its_targets(recorder: Recorder) -> None:
    net = torch.nn.Linear(5, 3)

    def step(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(net(x), target)

    compiled = torch.compile(step, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=2, eager_ops=0):
        for rows in (6, 7, 8):
            compiled(torch.randn(rows, 5), torch.randint(0, 3, (rows,))).backward()
    with pytest.raises(IndexError, match="target"):
        compiled(torch.randn(7, 5), torch.full((7,), 3))


def test_the_option_leaves_values_alone() -> None:
    compiled = torch.compile(lambda x, i: F.embedding(i, x), backend="dynaxla", options={"value_checks": False})
    assert compiled(*BEYOND[0])[1].isnan().all()


def test_values_that_many_calls_read_are_checked_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_DEBUG", f"dump={tmp_path},stages=fx")
    torch.compile(lambda x, i: x[i] + x.exp()[i] * x.sin()[i], backend="dynaxla")(*PLACES[0])
    (text,) = [each.read_text() for each in tmp_path.rglob("*") if each.is_file()]
    assert text.count("aten.all") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_bags_that_end_before_they_begin_raise(dynamic: bool) -> None:
    """In eager they do so on several threads alone."""
    compiled = torch.compile(CASES["bags that end late"][0], backend="dynaxla", dynamic=dynamic)
    with pytest.raises(RuntimeError):
        compiled(LARGE, of(0, 2, 1))
