"""Results of a bucket stay padded until somebody reads them, and inputs are padded without a program for each size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.device import compiled_graphs, storage
from dynaxla.device.dispatcher import OpDispatcher
from dynaxla.device.padded_buffers import BufferCopies
from dynaxla.device.storage import storage_of
from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import poisoned
from tests.device.test_compiled import DEVICE, compiled
from tests.tolerances import assert_close

BUCKETS = dynaxla.Explicit((8, 16))


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with mock.patch.object(compiled_graphs, "pad", poisoned):
        yield


class Counted:
    """How many copying programs and single ops ran."""

    def __init__(self) -> None:
        self.copies = self.ops = 0

    def __enter__(self) -> Counted:
        run_corner, run_op = BufferCopies._run, OpDispatcher.run

        def corner(*args: Any) -> Any:
            self.copies += 1
            return run_corner(*args)

        def op(*args: Any) -> Any:
            self.ops += 1
            return run_op(*args)

        self._patches = mock.patch.object(BufferCopies, "_run", corner), mock.patch.object(OpDispatcher, "run", op)
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()


def layers() -> tuple[nn.Module, nn.Module]:
    first = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Softmax(1))
    return first, nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 4), nn.Softmax(1))


def warm(*functions: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """The chain of functions, each with its buckets made for dims of size 2 and more."""

    def run(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    for length in (5, 6, 12):
        run(torch.randn(3, length, 6).to(DEVICE))
    return run


@torch.no_grad()
def test_between_two_graphs_nothing_is_cropped(recorder: Recorder) -> None:
    first, second = layers()
    on_device = [compiled(copy.deepcopy(each).to(DEVICE), buckets=BUCKETS) for each in (first, second)]
    run = warm(*on_device)
    for length in (3, 4, 7, 9, 11, 15):
        x = torch.randn(3, length, 6)
        mine = x.to(DEVICE)
        with recorder.expect(compiles=0), Counted() as counted:
            middle = on_device[0](mine)
            found = on_device[1](middle)
        assert (counted.copies, counted.ops) == (0, 0)
        wanted = second(first(x))
        assert (found.stride(), middle.stride()) == (wanted.stride(), first(x).stride())
        with Counted() as counted:  # nor are values that are read on the host
            assert_close(found.cpu(), wanted)
            assert_close(run(mine).cpu(), wanted)
            assert_close(middle.cpu(), first(x))
        assert (counted.copies, counted.ops) == (0, 0)


@torch.no_grad()
def test_whoever_reads_gets_eagers_tensor() -> None:
    first, _ = layers()
    run = warm(compiled(copy.deepcopy(first).to(DEVICE), buckets=BUCKETS))
    x = torch.randn(3, 7, 6)
    wanted = first(x)

    def anew() -> Tensor:
        found = run(x.to(DEVICE))
        assert storage_of(found).corner is not None
        return found

    assert_close((anew() + 1).cpu(), wanted + 1)
    assert_close(anew()[1, 2:5].cpu(), wanted[1, 2:5])
    assert_close(anew().view(21, 10).t().cpu(), wanted.view(21, 10).t())
    assert_close(anew().clone().cpu(), wanted)
    assert_close(torch.empty(3, 7, 10, device=DEVICE).copy_(anew()).cpu(), wanted)
    assert_close(copy.deepcopy(anew()).cpu(), wanted)
    assert float(anew().sum()) == pytest.approx(float(wanted.sum()), rel=1e-5)
    assert anew().untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    written, shared = anew(), anew()
    also = shared.clone()
    written.mul_(2)
    shared[0].fill_(7)
    assert storage_of(written).corner is None
    assert_close(written.cpu(), wanted * 2)
    assert_close(also.cpu(), wanted)
    assert_close(run(x.to(DEVICE)).cpu(), wanted)
    assert shared[0].eq(7).all()
    resized = anew()
    assert_close(resized.resize_(3, 70).cpu(), wanted.clone().resize_(3, 70))


@torch.no_grad()
def test_what_is_written_is_what_the_next_graph_takes() -> None:
    first, second = layers()
    on_device = [compiled(copy.deepcopy(each).to(DEVICE), buckets=BUCKETS) for each in (first, second)]
    warm(*on_device)
    for length in (5, 13):
        x = torch.randn(3, length, 6)
        middle, wanted = on_device[0](x.to(DEVICE)), first(x)
        assert storage_of(middle).corner is not None
        middle[:, 0] = 3
        wanted[:, 0] = 3
        assert storage_of(middle).corner is None
        assert_close(on_device[1](middle).cpu(), second(wanted))
        mine = x.to(DEVICE)
        mine.mul_(2)
        assert_close(on_device[0](mine).cpu(), first(x * 2))
        assert_close(on_device[0](mine[1:]).cpu(), first(x[1:] * 2))
        turned = torch.randn(length, 3, 6)
        assert_close(on_device[0](turned.to(DEVICE).transpose(0, 1)).cpu(), first(turned.transpose(0, 1)))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
def test_corners_of_every_dtype(dtype: torch.dtype) -> None:
    def double(x: Tensor) -> Tensor:
        return (x | x) if dtype is torch.bool else x + x

    on_device = compiled(double, dynamic=True, buckets=BUCKETS)
    for length in (5, 7, 11):
        x = (torch.randn(2, length, 3) * 3).to(dtype)
        found = on_device(x.to(DEVICE) if length > 5 else x.to(DEVICE).clone())
        assert_close(on_device(found).cpu(), double(double(x)))
        assert_close((found | found if dtype is torch.bool else found + found).cpu(), double(double(x)))


def test_training_with_buckets() -> None:
    first, _ = layers()
    model = nn.Sequential(first, nn.Sequential(nn.Linear(10, 4), nn.Tanh()))
    mine = copy.deepcopy(model).to(DEVICE)
    on_device = [compiled(each, buckets=BUCKETS) for each in mine]
    for length in (5, 7, 11, 3):
        x, weights = torch.randn(3, length, 6), torch.randn(3, length, 4)
        given = x.to(DEVICE).requires_grad_()
        x.requires_grad_()
        (model(x) * weights).sum().backward()
        (on_device[1](on_device[0](given)) * weights.to(DEVICE)).sum().backward()
        assert_close(given.grad.cpu(), x.grad)  # type: ignore[union-attr, arg-type]
    for one, other in zip(model.parameters(), mine.parameters(), strict=True):
        assert_close(other.grad.cpu(), one.grad)  # type: ignore[union-attr, arg-type]


def test_what_is_kept_of_the_host_is_bounded() -> None:
    with mock.patch.object(storage, "MOST_ORIGIN_BYTES", 4096):
        kept = [torch.randn(256).to(DEVICE) for _ in range(8)]
    with_origin = [storage_of(x).origin is not None for x in kept]
    assert not any(with_origin[:4])
    assert with_origin[-1]
