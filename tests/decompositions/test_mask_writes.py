"""`x[mask] = values` in training: the gradients of what a mask writes and of what it leaves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

ROWS = torch.tensor([True, False, True, False, True])
EVERY = torch.arange(20).reshape(5, 4) % 3 == 0  # 7 of 20
NONE = torch.zeros(5, dtype=torch.bool)

ONE_VALUE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "a number for rows": (ROWS, ()),
    "a row": (ROWS, (4,)),
    "a row, with a dim for the rows": (ROWS, (1, 4)),
    "a number for a row": (ROWS, (1,)),
    "a number for elements": (EVERY, ()),
    "one element": (EVERY, (1,)),
    "columns": ((slice(None), ROWS[:4]), (5, 1)),
    "a number for columns": ((..., ROWS[:4]), (1, 1)),
    "nothing": (NONE, (4,)),
}
COUNTED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "rows": (ROWS, (3, 4)),
    "a number for each row": (ROWS, (3, 1)),
    "elements": (EVERY, (7,)),
    "columns of their own": ((slice(None), ROWS[:4]), (5, 2)),
    "the same in each row": ((slice(None), ROWS[:4]), (2,)),
    "no rows": (NONE, (0, 4)),
}


def _written(x: Tensor, values: Tensor, where: Any) -> Tensor:
    y = x * 2
    y[where] = values
    return y.sin()


def _put(x: Tensor, values: Tensor, where: Any) -> Tensor:
    return torch.index_put(x * 2, (where,), values, accumulate=True).sin()


def _put_in_place(x: Tensor, values: Tensor, where: Any) -> Tensor:
    return (x * 2).index_put_((where,), values, accumulate=True).sin()


def _through_a_view(x: Tensor, values: Tensor, where: Any) -> Tensor:
    y = torch.cat([x, x]).cos()
    y[5:][where] = values
    return y * y


def _check(function: Any, recorder: Recorder, given: list[Tensor], *rest: Any, **counts: int) -> None:
    ways = (function, torch.compile(function, backend="dynaxla"))
    results = []
    with recorder.expect(**counts):
        for way in ways:
            leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
            out = way(*leaves, *rest)
            results.append((out, *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), leaves)))
    for expected, found in zip(*results, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("function", [_written, _through_a_view])
@pytest.mark.parametrize("name", ONE_VALUE)
def test_one_value_for_all_places(name: str, function: Any, recorder: Recorder) -> None:
    where, size = ONE_VALUE[name]
    _check(function, recorder, [torch.randn(5, 4), torch.randn(size)], where, compiles=2, eager_ops=0)


@pytest.mark.parametrize("name", COUNTED)
def test_as_many_values_as_places(name: str, recorder: Recorder) -> None:
    where, size = COUNTED[name]
    _check(_written, recorder, [torch.randn(5, 4), torch.randn(size)], where, compiles=2, eager_ops=0)


@pytest.mark.parametrize("function", [_put, _put_in_place])
@pytest.mark.parametrize("size", [(), (4,), (3, 4)])
def test_values_that_are_added(size: tuple[int, ...], function: Any, recorder: Recorder) -> None:
    _check(function, recorder, [torch.randn(5, 4), torch.randn(size)], ROWS, compiles=2, eager_ops=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes(dtype: torch.dtype, recorder: Recorder) -> None:
    def real(x: Tensor, values: Tensor) -> Tensor:
        y = x * 2
        y[ROWS] = values
        return torch.view_as_real(y) if y.is_complex() else y

    given = [torch.randn(5, 4, dtype=dtype), torch.randn(4, dtype=dtype)]
    ways = (real, torch.compile(real, backend="dynaxla"))
    expected, found = (
        torch.autograd.grad(way(*leaves).square().sum(), leaves)
        for way in ways
        for leaves in [[x.clone().requires_grad_() for x in given]]
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs)


def test_masks_of_bytes(recorder: Recorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of such masks
        _check(_written, recorder, [torch.randn(5, 4), torch.randn(4)], ROWS.to(torch.uint8), compiles=2, eager_ops=0)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_more_or_fewer_values_than_places_are_an_error(count: int, differentiable: bool) -> None:
    x, values = torch.randn(5, 4), torch.randn(count, 4, requires_grad=differentiable)
    with pytest.raises(RuntimeError, match=r"shape mismatch|more true values"):
        torch.compile(_written, backend="dynaxla")(x, values, ROWS)


@pytest.mark.parametrize("size", [(4,), (1, 4), (3, 4)])
@pytest.mark.parametrize("mask", [torch.ones(5, 1).bool(), torch.ones(1).bool(), torch.ones(6).bool()])
def test_a_mask_of_other_sizes_is_an_error(mask: Tensor, size: tuple[int, ...]) -> None:
    with pytest.raises((IndexError, RuntimeError), match="does not match"):
        torch.compile(_written, backend="dynaxla")(torch.randn(5, 4), torch.randn(size), mask)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_memory_and_zeros_are_eagers(dtype: torch.dtype, accumulate: bool, dynamic: bool) -> None:
    columns = ROWS[:4]

    def put(x: Tensor, values: Tensor) -> list[Tensor]:
        found = torch.ops.aten.index_put(x, [None, columns], values, accumulate)
        assigned = x.t().clone()
        assigned[columns] = values.t()
        alike = torch.ops.aten.index_put(x, [None, columns], values[:, :1], accumulate)
        repeated = torch.ops.aten.index_put(x, [columns[[0, 1, 2, 3, 1]]], values[:1].repeat(1, 2), accumulate)
        return [found, assigned, alike, repeated]

    values = torch.randn(5, 2).to(dtype)
    compiled = torch.compile(put, backend="dynaxla", dynamic=dynamic)
    for x in (torch.full((5, 4), -0.0), torch.randn(4, 5).t(), torch.randn(5, 8)[:, ::2]):
        for mine, its in zip(compiled(x.to(dtype), values), put(x.to(dtype), values), strict=True):
            assert_close(mine, its)
            assert mine.stride() == its.stride()
            assert torch.equal(mine.signbit(), its.signbit())


def _gated(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    y = x * 2
    y[mask] *= scale
    y[:, mask.sum(1) > 1] = y[:, mask.sum(1) > 1].flip(0)
    return y.sin()


@pytest.mark.parametrize("differentiable", [False, True])
def test_what_a_mask_reads_is_written_where_it_was(differentiable: bool, recorder: Recorder) -> None:
    """The graph ends where the mask reads; the number of what it reads varies, and is padded."""
    compiled, done = torch.compile(_gated, backend="dynaxla"), recorder.snapshot()
    for size in (5, 7, 6, 8):
        x = torch.randn(size, size, requires_grad=differentiable)
        mask = torch.rand(size, size) > 0.4
        mask[:2, :2] = True
        found, expected = compiled(x, mask, 3.0), _gated(x, mask, 3.0)
        assert_close(found, expected)
        if differentiable:
            weights = torch.randn(size, size)
            ways = ((way * weights).sum() for way in (found, expected))
            assert_close(*(torch.autograd.grad(way, x)[0] for way in ways))
    assert recorder.snapshot().eager_ops == done.eager_ops


def test_a_leaf_is_not_written() -> None:
    def write(x: Tensor, values: Tensor) -> Tensor:
        x[ROWS] = values
        return x

    given = [torch.randn(5, 4, requires_grad=True), torch.randn(4, requires_grad=True)]
    with pytest.raises(RuntimeError, match="leaf Variable"):
        torch.compile(write, backend="dynaxla")(*given)


class Masked(nn.Module):
    """A learned vector in the place of what is masked, as speech and picture models are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 6)
        self.learned = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.before(x)
        hidden[mask] = self.learned.to(hidden.dtype)
        return self.after(hidden).square().mean()


@pytest.mark.parametrize("again", [False, True])
def test_masked_training_with_lengths_that_vary(again: bool, recorder: Recorder) -> None:
    net = Masked()
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    with recorder.expect(eager_ops=0, compiles=2):  # forward and backward, in one bucket
        for length in (5, 9, 12, 13, 7):
            x, mask = torch.randn(3, length, 6), torch.rand(3, length) > 0.6
            run = (lambda x, m: checkpoint(compiled, x, m, use_reentrant=False)) if again else compiled
            expected = torch.autograd.grad(net(x, mask), list(net.parameters()))
            found = torch.autograd.grad(run(x, mask), list(net.parameters()))
            for mine, theirs in zip(found, expected, strict=True):
                assert_close(mine, theirs)


def test_derivatives_inside(recorder: Recorder) -> None:
    def inside(x: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda x, v: _written(x, v, mask).sum(), argnums=(0, 1))(x, values)

    given = (torch.randn(5, 4), torch.randn(4), ROWS)
    for found, expected in zip(torch.compile(inside, backend="dynaxla")(*given), inside(*given), strict=True):
        assert_close(found, expected)


def test_other_derivatives_inside(recorder: Recorder) -> None:
    x, values = torch.randn(5, 4), torch.randn(4)

    def inside(values: Tensor) -> tuple[Tensor, ...]:
        def write(v: Tensor) -> Tensor:
            return _written(x, v, ROWS)

        return (
            *torch.func.jvp(write, (values,), (values,)),
            torch.func.jacrev(write)(values),
            torch.func.jacfwd(write)(values),
        )

    for found, expected in zip(torch.compile(inside, backend="dynaxla")(values), inside(values), strict=True):
        assert_close(found, expected)


def test_writes_by_numbers_have_torchs_gradients(recorder: Recorder) -> None:
    def write(x: Tensor, values: Tensor) -> Tensor:
        y = x * 2
        y[torch.tensor([1, 3])] = values
        y = torch.index_put(y, (torch.tensor([0, 0]),), values.sin().expand(2, 4), accumulate=True)
        return y.cos()

    _check(write, recorder, [torch.randn(5, 4), torch.randn(4)], compiles=2, eager_ops=0)
