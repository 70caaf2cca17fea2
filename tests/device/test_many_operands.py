"""`cat` and `stack` of many tensors, which the device puts together group by group, against eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

Tensors = Sequence[torch.Tensor]


def _own(x: torch.Tensor) -> Tensors:
    return [row.clone() for row in x]


def _rows(x: torch.Tensor) -> Tensors:
    return list(x)


def _some_rows(x: torch.Tensor) -> Tensors:
    return [row if number % 3 else row.clone() for number, row in enumerate(x)]


def _columns(x: torch.Tensor) -> Tensors:
    return list(x.transpose(0, -1))


def _transposed(x: torch.Tensor) -> Tensors:
    return [row.transpose(0, -1) for row in x]


def _channels_last(x: torch.Tensor) -> Tensors:
    return [row.unsqueeze(0).expand(2, -1, -1, -1).contiguous(memory_format=torch.channels_last) for row in x]


def _wider(x: torch.Tensor) -> Tensors:
    return [row if number % 2 else row.double() for number, row in enumerate(x)]


def _conjugated(x: torch.Tensor) -> Tensors:
    return [row if number % 2 else torch.complex(row, row).conj() for number, row in enumerate(x)]


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
@pytest.mark.parametrize(
    "make",
    [_own, _rows, _some_rows, _columns, _transposed, _channels_last, _wider, _conjugated],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("count", [33, 70])
def test_values_and_strides(
    join: Callable[..., torch.Tensor], make: Callable[[torch.Tensor], Tensors], count: int, device: torch.device
) -> None:
    x = torch.randn(count, 3, 2, count if make is _columns else 4)
    for dim in (0, 1, -1):
        mine, eager = join(make(x.to(device)), dim), join(make(x), dim)
        assert_close(mine.cpu(), eager)
        assert mine.stride() == eager.stride()


@pytest.mark.parametrize("shape", [(40, 0), (40,), (40, 1)])
def test_rows_of_few_elements(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape)
    assert_close(torch.stack(list(x.to(device)), -1).cpu(), torch.stack(list(x), -1))


def test_errors_are_those_of_eager(device: torch.device) -> None:
    rows = list(torch.randn(40, 3))
    refused: list[tuple[Callable[..., torch.Tensor], Tensors, int]] = [
        (torch.cat, [*rows, torch.zeros(1, 3)], 0),
        (torch.stack, [*rows, torch.zeros(4)], 0),
        (torch.cat, rows, 1),
        (torch.stack, rows, 3),
        (torch.cat, [torch.zeros(())] * 40, 0),
    ]
    for join, tensors, dim in refused:
        with pytest.raises((RuntimeError, IndexError)) as eager:
            join(tensors, dim)
        with pytest.raises(eager.type):
            join([tensor.to(device) for tensor in tensors], dim)


def test_gradients_reach_every_row(device: torch.device) -> None:
    x = torch.randn(40, 3)
    mine, eager = (y.requires_grad_() for y in (x.to(device), x.clone()))
    for y in (mine, eager):
        torch.stack([row * row for row in y], 1).square().sum().backward()
    assert mine.grad is not None
    assert eager.grad is not None
    assert_close(mine.grad.cpu(), eager.grad)


@pytest.mark.parametrize("make", [_own, _rows])
def test_any_number_runs_the_same_few_programs(
    make: Callable[[torch.Tensor], Tensors], device: torch.device, recorder: Recorder
) -> None:
    """A program of 1,024 operands took XLA 8 s, one of as many rows of a memory two minutes."""
    x = torch.randn(1024, 5, device=device)
    tensors, before = make(x), recorder.snapshot().compiles
    assert_close(torch.stack(tensors).cpu(), x.cpu())
    with recorder.expect(compiles=0):
        assert_close(torch.stack([*tensors[512:], *tensors[:512]]).cpu(), x.cpu().roll(512, 0))
    assert_close(torch.stack(tensors[:992]).cpu(), x[:992].cpu())
    assert 3 <= recorder.snapshot().compiles - before <= 8
