"""Weights stay on the device and every change of one is seen at the next call, without a compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.weight_residency import make_picker
from dynaxla.runtime.write_tracking import WriteStamp, WriteTracker, count_writes
from dynaxla.torch_api.storages import data_address
from tests.tolerances import assert_close


def _conv_net() -> nn.Sequential:
    """The convolution's weight is folded (another layout), the linear layer's is shared with torch."""
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    return nn.Sequential(*layers).eval()


def _load_state(net: nn.Sequential) -> None:
    net.load_state_dict(
        {name: torch.rand_like(t) if t.is_floating_point() else t for name, t in net.state_dict().items()}
    )


def _in_place(net: nn.Sequential) -> None:
    net[0].weight.mul_(3)
    net[4].weight.add_(1)


def _through_data(net: nn.Sequential) -> None:
    """Autograd's version counter does not see these."""
    net[0].weight.data.mul_(-2)
    net[4].weight.data[0] = 7


def _one_element_through_data(net: nn.Sequential) -> None:
    net[0].weight.data[3, 1, 2, 2] += 40


def _swap_data(net: nn.Sequential) -> None:
    net[0].weight.data = torch.randn(8, 3, 3, 3)
    net[4].weight.data = torch.randn(5, 8 * 36)


def _replace_parameter(net: nn.Sequential) -> None:
    net[4].weight = nn.Parameter(torch.randn(5, 8 * 36))


def _through_numpy(net: nn.Sequential) -> None:
    net[0].weight.detach().numpy()[0] = 9


def _through_an_alias(net: nn.Sequential) -> None:
    net[0].weight.detach().view(-1)[5] = -11


def _statistics(net: nn.Sequential) -> None:
    net[1].running_mean.copy_(torch.randn(8))
    net[1].running_var.data.fill_(4)


CHANGES = (
    _load_state,
    _in_place,
    _through_data,
    _one_element_through_data,
    _swap_data,
    _replace_parameter,
    _through_numpy,
    _through_an_alias,
    _statistics,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@torch.no_grad()
def test_a_change_is_seen_without_recompiling(change: Callable[[nn.Sequential], None], recorder: Recorder) -> None:
    net = _conv_net()
    compiled = torch.compile(net, backend="dynaxla")
    x = torch.randn(2, 3, 6, 6)
    with recorder.expect(compiles=1, folds=1):
        assert_close(compiled(x), net(x))
    with recorder.expect(compiles=0, folds=0):
        for _ in range(3):
            change(net)
            assert_close(compiled(x), net(x))
            assert_close(compiled(x), net(x))


def _detach_into_numpy(net: nn.Sequential, folder: Path) -> list[np.ndarray]:
    return [parameter.detach().numpy() for parameter in net.parameters()]


def _take_from_numpy(net: nn.Sequential, folder: Path) -> list[np.ndarray]:
    arrays = [parameter.detach().numpy().copy() for parameter in net.parameters()]
    for parameter, array in zip(net.parameters(), arrays, strict=True):
        parameter.data = torch.from_numpy(array)
    return arrays


def _share(net: nn.Sequential, folder: Path) -> list[np.ndarray]:
    """Another process may write to memory that is shared; here another tensor does."""
    net.share_memory()
    return [torch.from_file(*_file_of(p), dtype=p.dtype).view(p.shape).numpy() for p in net.parameters()]


def _file_of(parameter: nn.Parameter) -> tuple[str, bool, int]:
    _, handle, _ = parameter.untyped_storage()._share_filename_cpu_()
    return f"/dev/shm{handle.decode()}", True, parameter.numel()


def _load_mapped(net: nn.Sequential, folder: Path) -> list[torch.Tensor]:
    """As `from_pretrained` of transformers does."""
    save_file(net.state_dict(), folder / "net.safetensors")
    net.load_state_dict(load_file(folder / "net.safetensors"), assign=True)
    return [parameter.data for parameter in net.parameters()]


def _load_mapped_and_hold(net: nn.Sequential, folder: Path) -> list[torch.Tensor]:
    save_file(net.state_dict(), folder / "net.safetensors")
    held = load_file(folder / "net.safetensors")
    net.load_state_dict(held, assign=True)
    return [tensor for tensor in held.values() if tensor.is_floating_point()]


OTHER_OWNERS = (_detach_into_numpy, _take_from_numpy, _share, _load_mapped, _load_mapped_and_hold)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("make", OTHER_OWNERS, ids=lambda f: f.__name__)
@torch.no_grad()
def test_a_write_by_another_owner_of_the_memory_is_seen(
    make: Callable[[nn.Sequential, Path], Sequence[Any]], late: bool, recorder: Recorder, tmp_path: Path
) -> None:
    net = _conv_net()
    compiled = torch.compile(net, backend="dynaxla")
    x = torch.randn(2, 3, 6, 6)
    if late:
        assert_close(compiled(x), net(x))
    owners = make(net, tmp_path)
    assert_close(compiled(x), net(x))
    with recorder.expect(compiles=0, folds=0):
        for _ in range(2):
            for owner in owners:
                owner *= 1.5
                assert_close(compiled(x), net(x))
                assert_close(compiled(x), net(x))
        for parameter in net.parameters():
            parameter.data += 1
            assert_close(compiled(x), net(x))


def test_comparisons_that_cost_time_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = WriteTracker()
    for _ in range(5):
        watch.stamp(torch.from_numpy(np.ones(1 << 16)), 0)
    assert [record.getMessage()[:7] for record in caplog.records] == ["weights"]


@torch.no_grad()
def test_weights_mapped_from_a_file_move_to_memory_whose_writes_are_seen(tmp_path: Path) -> None:
    net = _conv_net()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    net.load_state_dict(load_file(tmp_path / "net.safetensors"), assign=True)
    assert not net[0].weight.untyped_storage().resizable()
    versions = [parameter._version for parameter in net.parameters()]
    compiled = torch.compile(net, backend="dynaxla")
    x = torch.randn(2, 3, 6, 6)
    assert_close(compiled(x), net(x))
    assert net[0].weight.untyped_storage().resizable()
    assert [parameter._version for parameter in net.parameters()] == versions


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.float32, float("nan")), (torch.bfloat16, -0.0), (torch.complex128, 1j), (torch.bool, True)],
)
def test_contents_are_compared_by_their_bits(dtype: torch.dtype, fill: complex) -> None:
    watch = WriteTracker()
    weight = torch.full((3, 5), fill, dtype=dtype)
    owner = weight.view(torch.float32 if dtype is torch.complex128 else dtype).view(torch.uint8).numpy()
    stamp = watch.stamp(weight, count_writes(weight))
    assert stamp.contents is not None
    assert stamp.holds(weight)
    owner[0, 0] ^= 1
    assert not stamp.holds(weight)


@torch.no_grad()
def test_a_write_of_another_thread_that_had_begun_is_seen_when_it_ends() -> None:
    watch, weight = WriteTracker(), torch.zeros(4)
    pointer = weight.numpy()
    before = count_writes(weight)
    stamp = watch.stamp(weight, before)
    pointer[1] = 3
    del pointer
    assert not stamp.holds(weight)
    marked = watch.stamp(weight, count_writes(weight))
    assert marked.contents is None
    torch._C._autograd._unsafe_set_version_counter((weight,), (weight._version + 1,))
    assert not marked.holds(weight)


def test_weights_that_autograd_holds_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen weight is saved for the backward, where it is read in another layout."""
    stamps: list[WriteStamp] = []
    stamp = WriteTracker.stamp
    monkeypatch.setattr(WriteTracker, "stamp", lambda *args: stamps.append(stamp(*args)) or stamps[-1])
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    net[2].requires_grad_(False)
    compiled = torch.compile(net, backend="dynaxla")
    for _ in range(3):
        compiled(torch.randn(2, 3, 9, 9)).sum().backward()
        with torch.no_grad():
            net[0].weight.add_(0.1)
    assert stamps
    assert all(stamp.contents is None for stamp in stamps)


@torch.no_grad()
def test_retied_weight() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    net = nn.Sequential(first, second)
    compiled = torch.compile(net, backend="dynaxla")
    x = torch.randn(2, 6)
    assert_close(compiled(x), net(x))
    second.weight = first.weight
    assert_close(compiled(x), net(x))
    first.weight.mul_(2)
    assert_close(compiled(x), net(x))


@torch.no_grad()
def test_two_graphs_that_fold_one_weight_see_each_others_writes() -> None:
    net = _conv_net()
    one, two = torch.compile(net, backend="dynaxla"), torch.compile(lambda x: net(x) * 2, backend="dynaxla")
    x = torch.randn(2, 3, 6, 6)
    for _ in range(3):
        assert_close(one(x), net(x))
        net[0].weight.data.mul_(2)
        assert_close(two(x), net(x) * 2)
        assert_close(one(x), net(x))


@torch.no_grad()
def test_unchanged_weights_are_neither_imported_nor_folded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaxla.runtime.weight_residency import WeightResidency

    excludes_call = []
    original = WeightResidency._bind
    monkeypatch.setattr(WeightResidency, "_bind", lambda self, *args: excludes_call.append(1) or original(self, *args))
    net = _conv_net()
    one, two = torch.compile(net, backend="dynaxla"), torch.compile(lambda x: net(x) * 2, backend="dynaxla")
    x = torch.randn(2, 3, 6, 6)
    for _ in range(4):
        one(x), two(x)
    settled = len(excludes_call)
    for _ in range(5):
        one(x), two(x), net(x)
    assert len(excludes_call) == settled


@pytest.mark.parametrize("places", [(), (0,), (3,), (1, 2, 3), (0, 2, 3), (4, 1)])
def test_weights_are_picked_out_of_the_arguments(places: tuple[int, ...]) -> None:
    assert list(make_picker(places)([10, 11, 12, 13, 14])) == [10 + place for place in places]


@torch.no_grad()
def test_moved_module_and_changed_dtype() -> None:
    net = nn.Linear(4, 4)
    compiled = torch.compile(net, backend="dynaxla")
    assert_close(compiled(torch.ones(2, 4)), net(torch.ones(2, 4)))
    net.to(torch.float64)
    x = torch.ones(2, 4, dtype=torch.float64)
    assert_close(compiled(x), net(x))


@torch.no_grad()
def test_weights_with_odd_memory() -> None:
    """Transposed, misaligned, expanded, numpy-owned and shared-memory weights."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(1 + 36)
            self.transposed = nn.Parameter(torch.randn(6, 6).t())
            self.misaligned = nn.Parameter(flat[1:].view(6, 6))
            self.numpy = nn.Parameter(torch.from_numpy(np.random.rand(6, 6).astype("float32")))
            self.shared = nn.Parameter(torch.randn(6, 6).share_memory_())
            self.register_buffer("expanded", torch.randn(6, 1).expand(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in (self.transposed, self.misaligned, self.numpy, self.shared, self.expanded):
                x = torch.tanh(x @ weight)
            return x

    net = Odd()
    compiled = torch.compile(net, backend="dynaxla")
    x = torch.randn(3, 6)
    assert_close(compiled(x), net(x))
    for parameter in net.parameters():
        parameter.add_(0.5)
        assert_close(compiled(x), net(x))
    net.transposed.data.mul_(3)
    net.misaligned.data.mul_(3)
    assert_close(compiled(x), net(x))


def test_inference_mode_weights() -> None:
    with torch.inference_mode():
        net = _conv_net()
        compiled = torch.compile(net, backend="dynaxla")
        x = torch.randn(2, 3, 6, 6)
        assert_close(compiled(x), net(x))
        net[0].weight.mul_(2)
        net[4].weight.mul_(2)
        assert_close(compiled(x), net(x))


def test_stamp_sees_every_kind_of_write_and_no_read() -> None:
    watch = WriteTracker()
    weight = nn.Parameter(torch.randn(4, 4))
    address = data_address(weight)
    stamp = watch.stamp(weight, count_writes(weight))
    with torch.no_grad():
        _ = weight + 1, weight.sum(), torch.nn.functional.linear(torch.ones(1, 4), weight), weight.t().contiguous()
    assert stamp.holds(weight)
    weight.data.zero_()
    assert not stamp.holds(weight)
    assert data_address(weight) == address  # following a weight never moves it
    fresh = watch.stamp(weight, count_writes(weight))
    assert fresh.holds(weight)
    assert not stamp.holds(weight)


@torch.no_grad()
@pytest.mark.parametrize("apart", [64 * 64, 64 * 64 + 1])  # in alignment that PJRT shares, and in one that it copies
def test_a_weight_that_moves_within_its_storage(apart: int) -> None:
    flat = torch.randn(2 * apart)
    layer = nn.Linear(64, 64, bias=False)
    compiled = torch.compile(layer, backend="dynaxla")
    x = torch.randn(4, 64)
    for place in (0, apart, 0):
        layer.weight.data = flat[place : place + 64 * 64].view(64, 64)
        assert_close(compiled(x), layer(x))
    flat.mul_(2)
    assert_close(compiled(x), layer(x))


@torch.no_grad()
def test_mutated_buffers_and_training_statistics() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            return self.norm(x) + self.total

    net, reference = Counter().train(), Counter().train()
    compiled = torch.compile(net, backend="dynaxla")
    total = net.total
    for _ in range(3):
        x = torch.randn(5, 3)
        assert_close(compiled(x), reference(x))
    assert net.total is total
    for name, value in reference.state_dict().items():
        assert_close(net.state_dict()[name], value)
