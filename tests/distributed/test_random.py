"""Random numbers of DTensors: replicas have the same ones, shards others, and a seed repeats them, in eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import dynaxla
from tests.distributed.children import run_ranks
from tests.distributed.models import build, mesh_of

ROWS = 32


@cache
def mesh() -> dt.DeviceMesh:
    """One object: torch confuses equal meshes in graphs with DTensors."""
    return mesh_of("dynaxla")


def ones(placement: Placement, *shape: int) -> DTensor:
    return distribute_tensor(torch.ones(*shape or (ROWS, 4), device="dynaxla"), mesh(), [placement])


def made(draw: Callable[..., DTensor]) -> Callable[[DTensor], DTensor]:
    return lambda like: draw(*like.shape, device_mesh=like.device_mesh, placements=like.placements)


DRAWS: dict[str, Callable[[DTensor], DTensor]] = {
    "dropout": F.dropout,
    "rand": made(dt.rand),
    "randn": made(dt.randn),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "normal_": lambda x: x.clone().normal_(2, 3),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "xavier_uniform_": lambda x: nn.init.xavier_uniform_(x.clone()),
    "kaiming_normal_": lambda x: nn.init.kaiming_normal_(x.clone()),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x.clone()),
}


def everywhere(x: Tensor) -> list[Tensor]:
    """What every process has of a tensor."""
    found: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (x.to_local() if isinstance(x, DTensor) else x).detach().cpu())
    return found  # type: ignore[return-value]


def assert_placed(x: Tensor, is_sharded: bool, what: str) -> None:
    mine, *others = everywhere(x)
    assert all(torch.equal(mine, other) is not is_sharded for other in others), what


def check_draws(rank: int) -> None:
    for placement in (Replicate(), Shard(0), Shard(1)):
        for name, draw in DRAWS.items():
            torch.manual_seed(4)
            one, two = draw(ones(placement)), draw(ones(placement))
            assert_placed(one, placement != Replicate(), name)
            assert not torch.equal(one.full_tensor().cpu(), two.full_tensor().cpu()), name
            after = torch.dynaxla.get_rng_state()
            assert len({each.numpy().tobytes() for each in everywhere(after)}) == 1, name
            torch.manual_seed(4)
            assert torch.equal(draw(ones(placement)).to_local().cpu(), one.to_local().cpu()), name
    single = [dt.rand(2, device_mesh=mesh(), placements=[Shard(0)]).full_tensor().tolist() for _ in range(9)]
    numbers = [number for pair in single for number in pair]
    assert len(set(numbers)) == len(numbers), "shards of one element"
    whole = dt.randn(4000, device_mesh=mesh(), placements=[Shard(0)]).full_tensor().cpu()
    assert abs(whole.mean().item()) < 0.1
    assert abs(whole.std().item() - 1) < 0.1


def check_ops_that_draw_more_than_once(rank: int) -> None:
    """No op of torch's does: here is a region as torch makes for one, in which two tensors are drawn."""
    tracker = dt._random._rng_tracker
    drawn: list[float] = []
    for placement in (Shard(0), Replicate()):
        spec = ones(placement)._spec
        torch.manual_seed(4)
        for _ in range(3):
            with tracker._distribute_region(spec):
                both = torch.stack([torch.rand(4, device="dynaxla") for _ in range(2)])
            assert_placed(both, placement == Shard(0), "a region")
            kept = everywhere(both) if placement == Shard(0) else [both.cpu()]
            drawn += [number for each in kept for number in each.flatten().tolist()]
        after = torch.dynaxla.get_rng_state()
        assert len({each.numpy().tobytes() for each in everywhere(after)}) == 1
    assert len(set(drawn)) == len(drawn), "every draw of every shard and op is another one"


def check_generators(rank: int) -> None:
    generator = torch.Generator(device="dynaxla").manual_seed(7)
    x, before = ones(Shard(0)), torch.dynaxla.get_rng_state()
    drawn = [x.clone().normal_(generator=generator).full_tensor().cpu() for _ in range(2)]
    assert torch.equal(torch.dynaxla.get_rng_state(), before)
    generator.manual_seed(7)
    assert torch.equal(x.clone().normal_(generator=generator).full_tensor().cpu(), drawn[0])
    assert not torch.equal(*drawn)
    assert not torch.equal(*drawn[0].chunk(2))
    with torch.random.fork_rng(device_type="dynaxla"):
        one = F.dropout(x).full_tensor().cpu()
    assert torch.equal(F.dropout(x).full_tensor().cpu(), one)
    with CommDebugMode() as seen:
        F.dropout(x)
    assert seen.get_total_counts() == 0
    dt._random.manual_seed(11, mesh())
    assert torch.dynaxla.initial_seed() == 11


def check_modules(rank: int) -> None:
    torch.manual_seed(rank)
    with torch.device("meta"):
        net = fully_shard(nn.Linear(64, 64), mesh=mesh())
    net.to_empty(device="dynaxla").reset_parameters()
    assert_placed(net.weight, True, "fully_shard")
    bound = net.weight.full_tensor().abs().max().item()
    assert 0.11 < bound <= 0.125

    def place(name: str, module: nn.Module, mesh: dt.DeviceMesh) -> None:
        for key, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(nn.init.normal_(distribute_tensor(value, mesh, [Replicate()]))))

    replicated = distribute_module(nn.Linear(8, 8).to("dynaxla"), mesh(), place)
    assert_placed(replicated.weight, False, "distribute_module")
    torch.manual_seed(3)
    layers = parallelize_module(build("dynaxla").blocks[0], mesh(), {"up": ColwiseParallel()})
    nn.init.uniform_(layers.up.weight)
    assert_placed(layers.up.weight, True, "parallelize_module")


def mask_of(x: DTensor, function: Callable[[DTensor], Tensor]) -> None:
    """The gradient of a dropout of ones is its result."""
    x = x.clone().requires_grad_()
    y = function(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor().cpu(), y.full_tensor().detach().cpu())


def check_gradients(rank: int) -> None:
    torch.manual_seed(0)
    for placement in (Shard(0), Replicate()):
        x = ones(placement)
        mask_of(x, F.dropout)
        mask_of(x, lambda x: checkpoint(F.dropout, x, use_reentrant=False))
        compiled = torch.compile(lambda x: F.dropout(x * 1.0), backend="dynaxla", options={"fallback": "error"})
        mask_of(x, compiled)
        with dynaxla.recorder().expect(compiles=0):
            mask_of(x, compiled)
        drawn = [compiled(x) for _ in range(3)]
        for one, two in pairwise(drawn):
            assert not torch.equal(one.to_local().cpu(), two.to_local().cpu())
        assert_placed(drawn[0], placement == Shard(0), "compiled")
        assert len({each.numpy().tobytes() for each in everywhere(torch.dynaxla.get_rng_state())}) == 1
        torch.manual_seed(5)
        one = compiled(x).full_tensor().cpu()
        torch.manual_seed(5)
        assert torch.equal(compiled(x).full_tensor().cpu(), one)


def check_left_to_eager(rank: int) -> None:
    """Draws in a graph that are ops of torch's would be the same for all shards: such a graph runs in eager."""
    torch.manual_seed(0)
    x = ones(Shard(0))
    eager = torch.compile(lambda x: torch.rand_like(x) + x, backend="dynaxla", options={"rng": "eager"})
    assert_placed(eager(x), True, "rng=eager")
    assert any("random; a DTensor's draw" in each for each in dynaxla.read_metrics().fallbacks)
    factory = torch.compile(lambda x: x * 2 + made(dt.rand)(x), backend="dynaxla", options={"fallback": "error"})
    assert_placed(factory(x), True, "a factory in a graph")


def check_all(rank: int) -> None:
    for check in (
        check_modules,
        check_draws,
        check_ops_that_draw_more_than_once,
        check_generators,
        check_gradients,
        check_left_to_eager,
    ):
        check(rank)


def test_draws_of_dtensors() -> None:
    run_ranks(check_all)
