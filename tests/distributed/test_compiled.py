"""Compiled graphs with collectives: one executable per direction, which all processes run together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dynaxla
from dynaxla.observe.collectives import list_collectives
from dynaxla.runtime.joint_programs import JointExecutable
from tests.distributed.children import run_ranks
from tests.distributed.models import train
from tests.distributed.test_training import assert_same
from tests.tolerances import assert_close

ROWS = (4, 6, 5, 12, 6)


class Programs:
    """The programs of several processes that were loaded, by what XLA runs in them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.collectives: list[list[str]] = []
        make = JointExecutable.__init__

        def init(made: JointExecutable, *args: Any) -> None:
            make(made, *args)
            self.collectives.append([each.kind for each in list_collectives(made.hlo_text())])

        patch.setattr(JointExecutable, "__init__", init)


def _compile(net: nn.Module) -> Any:
    return torch.compile(net, backend="dynaxla")


def check_training(rank: int) -> None:
    """Forward and backward are one executable each, collectives included; sizes that vary share those of a bucket."""
    with pytest.MonkeyPatch.context() as patch:
        programs = Programs(patch)
        for way, rows, count in (
            ("tensor_parallel", None, 2),
            ("sequence_parallel", None, 2),
            ("tensor_parallel", ROWS, 8),
        ):
            torch._dynamo.reset()
            programs.collectives.clear()
            before = dynaxla.read_metrics()
            mine = train(way, "dynaxla", _compile, rows=rows)
            after = dynaxla.read_metrics()
            assert after.fallbacks == before.fallbacks, after.fallbacks
            assert after.host_ops == before.host_ops, after.host_ops
            inside = [each for each in programs.collectives if len(each) > 1]  # others are those of single calls
            assert 2 <= len(inside) <= count, programs.collectives
            assert_same(mine, train(way, "cpu", rows=rows), way)


def test_training_is_gloos() -> None:
    run_ranks(check_training)


def check_hooks(rank: int) -> None:
    """Collectives of DDP and FSDP2 run in eager, between the executables."""
    for way in ("ddp_in_one_bucket", "fsdp"):
        torch._dynamo.reset()
        before = dynaxla.read_metrics()
        mine = train(way, "dynaxla", _compile, steps=3)
        after = dynaxla.read_metrics()
        assert after.graphs > before.graphs
        assert (after.fallbacks, after.host_ops) == (before.fallbacks, before.host_ops)
        assert_same(mine, train(way, "cpu", steps=3), way)


@pytest.mark.long
def test_compiled_modules_of_ddp_and_fsdp_are_gloos() -> None:
    run_ranks(check_hooks)


def _use_all(x: Tensor, group: Any, size: int) -> list[Tensor]:
    reduced = funcol.all_reduce(x.exp(), "sum", group)
    largest = funcol.all_reduce(x, "max", group)
    gathered = funcol.all_gather_tensor(x * 2, 0, group)
    columns = funcol.all_gather_tensor(x + 1, 1, group)
    scattered = funcol.reduce_scatter_tensor(gathered.sin(), "sum", 0, group)
    exchanged = funcol.all_to_all_single(x, None, None, group)
    sent = funcol.broadcast(x.cos(), 1, group)
    several = funcol.all_reduce_coalesced([x, x[:, :1] * 3], "sum", group)
    mean = funcol.all_reduce(x, "avg", group)
    turned = funcol.permute_tensor(x.flatten() * 2, [(i + 1) % size for i in range(size)], group)
    return [reduced, largest, gathered, columns, scattered, exchanged, sent, *several, mean, turned]


def _differentiate(x: Tensor, group: Any, size: int) -> list[Tensor]:
    gathered = funcol.all_gather_tensor_autograd(x * x, 0, group)
    scattered = funcol.reduce_scatter_tensor_autograd(gathered.sin(), "sum", 0, group)
    exchanged = funcol.all_to_all_single_autograd(scattered.exp(), None, None, group)
    return [gathered, scattered, exchanged]


def _run(function: Any, x: Tensor, group: Any, differentiated: bool) -> list[Tensor]:
    x = x.detach().clone().requires_grad_(differentiated)
    results = [each + 0 for each in function(x, group, dist.get_world_size())]
    if differentiated:
        sum(each.square().sum() for each in results).backward()  # type: ignore[union-attr]
        assert x.grad is not None
        results.append(x.grad)
    return [each.detach().cpu() for each in results]


def check_ops(rank: int) -> None:
    gloo, world = dist.new_group(backend="gloo"), dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        programs = Programs(patch)
        for function in (_use_all, _differentiate):
            for dynamic in (False, True):
                torch._dynamo.reset()
                programs.collectives.clear()
                fallbacks = dynaxla.read_metrics().fallbacks
                compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
                for rows in (4, 6, 10, 4) if dynamic else (4,):
                    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank + 10 * rows))
                    differentiated = function is _differentiate
                    mine = _run(compiled, x.to("dynaxla"), world, differentiated)
                    for one, other in zip(mine, _run(function, x, gloo, differentiated), strict=True):
                        assert_close(one, other)
                assert dynaxla.read_metrics().fallbacks == fallbacks, dynaxla.read_metrics().fallbacks
                kinds = {kind for each in programs.collectives for kind in each}
                assert {"all-gather", "reduce-scatter", "all-to-all"} <= kinds, kinds
                assert differentiated or "collective-permute" in kinds, kinds
                directions = 2 if differentiated else 1
                assert len([each for each in programs.collectives if each]) <= directions * (3 if dynamic else 1)


def check_permutation(rank: int) -> None:
    """Its gradient is the permutation back, which torch does not have in eager."""
    for executor in ("pjrt", "eager"):
        torch._dynamo.reset()

        @torch.compile(backend="dynaxla", options={"executor": executor, "fallback": "error"})
        def turn(x: Tensor) -> Tensor:
            return funcol.permute_tensor(x * x, [1, 0], dist.group.WORLD) * (rank + 2)

        for size in (3, 5):
            x = torch.arange(float(size), device="dynaxla").add(rank).requires_grad_()
            y = turn(x)
            y.sum().backward()
            other = torch.arange(float(size)) + (1 - rank)
            assert_close(y.detach().cpu(), other.square() * (rank + 2))
            assert x.grad is not None
            assert_close(x.grad.cpu(), 2 * x.detach().cpu() * (1 - rank + 2))


def check_all_ops(rank: int) -> None:
    check_ops(rank)
    check_permutation(rank)


def test_functional_collectives_are_gloos() -> None:
    run_ranks(check_all_ops)


def check_mesh(rank: int) -> None:
    """A mesh of two dims: a program has the groups of all rows and columns."""
    mesh = init_device_mesh("dynaxla", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = mesh["dp"].get_group(), mesh["tp"].get_group()

    @torch.compile(backend="dynaxla")
    def both(x: Tensor) -> Tensor:
        return funcol.all_reduce(funcol.all_reduce(x, "sum", columns).square(), "sum", rows)

    x = torch.tensor([rank + 1.0], device="dynaxla")
    assert both(x).tolist() == [3.0**2 + 7.0**2]

    @torch.compile(backend="dynaxla")
    def one(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", columns) + rank // 2

    assert one(x).tolist() == [(3.0 if rank < 2 else 7.0) + rank // 2]


@pytest.mark.long
def test_a_program_of_a_mesh() -> None:
    run_ranks(check_mesh, size=4)
