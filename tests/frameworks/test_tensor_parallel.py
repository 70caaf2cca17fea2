"""Tensor parallel layers at sizes that vary: the mesh of a DTensor is an input of the graph, which no program takes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dynaxla
from dynaxla import backend
from dynaxla.cache.store import Store
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.runtime_state import process
from tests.bucketing.poison import faults
from tests.lists import quick
from tests.tolerances import assert_close

RANKS = 2
LENGTHS = (6, 8, 10, 34, 8)  # divisible by the ranks
BUCKETS = 3  # 8, 16, 64, and half of them


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Sequence(nn.Module):
    """Of the whole sequence it gives each rank a piece."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block, self.pieces, self.piece = block, mesh.size(), mesh.get_local_rank()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.chunk(self.pieces, 1)[self.piece])


class Inside(nn.Module):
    """DTensors made and unmade within the graph."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block, self.mesh = block, mesh

    def forward(self, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        pieces: Any = whole.redistribute(self.mesh, [Shard(1)])
        return self.block(pieces.exp().full_tensor())


def parallelize(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def parallelize_sequence(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return Sequence(parallelize_module(block, mesh, plan), mesh)


def use_tensors_inside(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return Inside(block, mesh)


Way = Callable[[nn.Module, DeviceMesh], nn.Module]


def build() -> nn.Module:
    torch.manual_seed(1)
    return Block()


def compile_powers(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", dynamic=True, options={"buckets": dynaxla.PowersOfTwo()})


def _call(net: Callable[[Tensor], Tensor], block: nn.Module, length: int, training: bool) -> dict[str, Tensor]:
    """The result, and in training the gradients of the input and of a block's parameters, by their names."""
    torch.manual_seed(length)
    x = torch.randn(2, length, 8).mul(0.5).requires_grad_(training)
    with torch.set_grad_enabled(training):
        result = net(x)
    found = {"result": result.detach()}
    if training:
        result.square().sum().backward()
        assert x.grad is not None
        found["input"] = x.grad
        for name, parameter in block.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            parameter.grad = None
    return found


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one process: this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", quick([parallelize, parallelize_sequence, use_tensors_inside], parallelize))
def test_lengths_vary_in_one_process(way: Way, training: bool, mesh: DeviceMesh, recorder: Recorder) -> None:
    net = build()
    split = way(copy.deepcopy(net), mesh)
    block = split if way is parallelize else split.block
    whole = (lambda x: net(x.exp())) if way is use_tensors_inside else net
    compiled = compile_powers(split)
    graphs = 2 if training else 1
    with recorder.expect(graphs=graphs, compiles=BUCKETS * graphs, eager_ops=0):
        for length in LENGTHS:
            _assert_same(_call(compiled, block, length, training), _call(whole, net, length, training))


def test_a_backward_of_dtensors_runs_again_where_captures_are_stored(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dataclasses.replace(process(), executables=ExecutableCache(Store(tmp_path / "own")))
    monkeypatch.setattr(backend, "process", lambda: own)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    compiled = torch.compile(lambda x: x.sin() * x.cos(), backend="dynaxla")
    loss = compiled(x).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert isinstance(x.grad, DTensor)
    assert_close(x.grad.full_tensor(), 2 * (2 * x.detach().full_tensor()).cos())


@pytest.mark.parametrize("dynamic", [False, True])
def test_parameters_of_an_unused_result_have_no_gradients(mesh: DeviceMesh, dynamic: bool) -> None:
    """The results are no DTensors; the parameters are."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x * 2).to_local(), (x.log() * y).to_local(), y.to_local().sqrt()  # type: ignore[attr-defined]

    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for used in (0, 1, 2):
        found = []
        for run in (function, compiled):
            x, y = (
                distribute_tensor(torch.eye(4), mesh, [Shard(0)]).requires_grad_(),
                distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_(),
            )
            run(x, y)[used].sum().backward()
            found.append([None if each.grad is None else each.grad.full_tensor() for each in (x, y)])  # type: ignore[attr-defined]
        for mine, eagers in zip(found[1], found[0], strict=True):
            assert (mine is None) == (eagers is None)
            if mine is not None:
                assert_close(mine, eagers)


def test_no_capture_is_kept(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has another mesh."""
    own = dataclasses.replace(process(), executables=ExecutableCache(Store(tmp_path / "own")))
    monkeypatch.setattr(backend, "process", lambda: own)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    net, before = build(), dynaxla.read_metrics()
    split = parallelize(copy.deepcopy(net), mesh)
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(split, backend="dynaxla", dynamic=True)
        for length in LENGTHS[:2]:
            _assert_same(_call(compiled, split, length, False), _call(net, net, length, False))
    after = dynaxla.read_metrics()
    assert after.captures_loaded == before.captures_loaded
    told = after.captures_not_kept[len(before.captures_not_kept) :]
    assert told
    assert all("an object that is of this process alone: DeviceMesh" in text for text in told), told


def _assert_same(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, mine in ours.items():
        assert_close(mine, wanted[name])


def _run_rank(rank: int, way: Way, training: bool, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=500))
    try:
        split = way(build(), init_device_mesh("cpu", (RANKS,)))
        block = split if way is parallelize else split.block
        compiled = compile_powers(split)
        before, found, programs = dynaxla.read_metrics(), [], []
        for length in LENGTHS:
            found.append(_call(compiled, block, length, training))
            after = dynaxla.read_metrics()
            programs.append(after.compiles + after.loads)
        seen = {"found": found, "faults": faults(before, after), "fallbacks": after.fallbacks, "graphs": after.graphs}
        seen["exact_shapes"] = [str(each) for each in after.exact_shapes]
        torch.save({**seen, "programs": programs}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", [parallelize, parallelize_sequence])
def test_lengths_vary_in_two_processes(way: Way, training: bool, tmp_path: Path) -> None:
    """Collectives run in eager between the parts, each of which has a program for each bucket.

    Of a sequence in pieces some parts are not padded: they have a program for each length, and a reason for it.
    """
    mp.spawn(_run_rank, (way, training, str(tmp_path)), nprocs=RANKS)
    net = build()
    for rank in range(RANKS):
        seen = torch.load(tmp_path / f"{rank}.pt")
        assert not seen["faults"]
        assert seen["graphs"] == (2 if training else 1)
        assert seen["fallbacks"]
        assert all(text.startswith("_c10d_functional.") for text in seen["fallbacks"])
        of_6, of_8, of_10, of_34, of_8_again = seen["programs"]
        assert of_8 < of_10 < of_34 == of_8_again
        assert (of_6 == of_8) == (way is parallelize) == (not seen["exact_shapes"]), seen["exact_shapes"]
        for ours, length in zip(seen["found"], LENGTHS, strict=True):
            _assert_same(ours, _expected(net, way, rank, length, training))


def _expected(net: nn.Module, way: Way, rank: int, length: int, training: bool) -> dict[str, Tensor]:
    """What the whole net gives in eager; of a sequence's results and the input's gradient, the rank's piece."""
    found = _call(net, net, length, training)
    if way is parallelize_sequence:
        found["result"] = found["result"].chunk(RANKS, 1)[rank]
        if training:
            mine = torch.zeros_like(found["input"])
            piece = found["input"].chunk(RANKS, 1)[rank]
            mine.narrow(1, rank * piece.shape[1], piece.shape[1]).copy_(piece)
            found["input"] = mine
    return found
