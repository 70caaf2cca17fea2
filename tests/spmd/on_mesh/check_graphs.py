"""Compiled graphs over a mesh: one compile, buckets, donation, constraints, and what XLA adds of collectives."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from torch import Tensor, nn

import dynaxla
from dynaxla.device.registration import device_in_use
from dynaxla.device.storage import storage_of
from dynaxla.errors import ShardingError
from dynaxla.mesh import Mesh
from dynaxla.observe.collectives import list_collectives
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.mesh_devices import MeshDevices
from tests.spmd.on_mesh.check_tensors import spec_of
from tests.tolerances import assert_close


@pytest.fixture
def recorder() -> Recorder:
    return dynaxla.recorder()


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", options={"fallback": "error"}, **how)


def collectives_of(call: Callable[[], object]) -> Counter[str]:
    """The kinds of collectives of the programs that a call compiles."""
    devices: MeshDevices = device_in_use().client.mesh_devices
    before = set(devices.programs)
    kept = call()
    made = [program for program in devices.programs if program not in before]
    assert kept is not None
    return Counter(each.kind for program in made for each in list_collectives(program.hlo_text()))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_one_compile_whatever_the_number_of_devices(devices: int, recorder: Recorder) -> None:
    mesh = dynaxla.make_mesh((devices,), ("data",))
    x, w = torch.randn(16, 8), torch.randn(8, 8)
    f = compiled(lambda x, w: torch.tanh(x @ w).sum(1))
    made, there = dynaxla.shard(x, mesh, ("data",)), dynaxla.shard(w, mesh, ())
    with recorder.expect(compiles=1, graphs=1):
        got = f(made, there)
        again = f(made, there)
    assert_close(got.cpu(), torch.tanh(x @ w).sum(1))
    assert torch.equal(got.cpu(), again.cpu())
    assert spec_of(got) == ("data",)


def test_one_function_serves_all_shardings(mesh: Mesh, recorder: Recorder) -> None:
    x = torch.randn(16, 8)
    f = compiled(lambda x: (x * 2).cumsum(1))
    with recorder.expect(graphs=1, compiles=4):
        for _ in range(2):
            for made in (
                x.to("dynaxla"),
                dynaxla.shard(x, mesh, ("data",)),
                dynaxla.shard(x, mesh, (None, "model")),
                dynaxla.shard(x, dynaxla.make_mesh((8,), ("data",)), ("data",)),
            ):
                assert_close(f(made).cpu(), (x * 2).cumsum(1))


def test_programs_of_many_shardings_are_bounded(mesh: Mesh, recorder: Recorder) -> None:
    torch._dynamo.reset()
    x = torch.randn(16, 8)
    f = torch.compile(lambda x: x.cumsum(1) - 1, backend="dynaxla", options={"max_executables": 2})
    shardings = (("data",), (None, "model"), ("model",))
    with recorder.expect(graphs=1, compiles=4):
        for spec in (*shardings, shardings[2], shardings[0]):  # of three programs the last two are there
            assert_close(f(dynaxla.shard(x, mesh, spec)).cpu(), x.cumsum(1) - 1)


def test_results_that_do_not_divide_are_on_every_device(mesh: Mesh) -> None:
    x = torch.randn(16, 8)
    made = dynaxla.shard(x, mesh, ("data", "model"))
    got = compiled(lambda x: (x[:15, :7] + 1, x[:14]))(made)
    assert_close(got[0].cpu(), x[:15, :7] + 1)
    assert_close(got[1].cpu(), x[:14])
    assert spec_of(got[0]) == (None, None)


def test_buckets_and_their_masks(mesh: Mesh, recorder: Recorder) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    on_mesh = dynaxla.shard(
        nn.Sequential(*model).to("dynaxla"), mesh, {"0.weight": ("model",), "2.weight": (None, "model")}
    )
    host = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    host.load_state_dict({name: value.cpu() for name, value in on_mesh.state_dict().items()})

    def run(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net(x)
        return y.softmax(1), y.mean(1)

    f = compiled(lambda x: run(on_mesh, x), dynamic=None)
    sizes = (5, 9, 11, 13, 16, 10)
    with torch.no_grad():
        for number, length in enumerate(sizes):
            x = torch.randn(4, length, 8)
            made = dynaxla.shard(x, mesh, ("data",))
            torch._dynamo.maybe_mark_dynamic(made, 1)
            before = recorder.snapshot().compiles
            for got, expected in zip(f(made), run(host, x), strict=True):
                assert_close(got.cpu(), expected)
            if number > 3:
                assert recorder.snapshot().compiles == before, "its bucket is there"


def test_a_bucket_of_the_split_dim(mesh: Mesh) -> None:
    f = compiled(lambda x: (x.sum(0), x.softmax(0)), dynamic=True)
    for rows in (6, 10, 14):
        x = torch.randn(rows, 8)
        made = dynaxla.shard(x, mesh, ("data",))
        for got, expected in zip(f(made), (x.sum(0), x.softmax(0)), strict=True):
            assert_close(got.cpu(), expected)


def test_new_values_of_donated_inputs_stay_where_they_are(mesh: Mesh) -> None:
    cache = dynaxla.shard(torch.zeros(8, 16, 4), mesh, ("data", None, "model"))
    step = compiled(lambda cache, x: cache[:, 3:4].copy_(x))
    x = torch.randn(8, 1, 4)
    with torch.no_grad():
        step(cache, dynaxla.shard(x, mesh, ("data",)))
    assert spec_of(cache) == ("data", None, "model")
    expected = torch.zeros(8, 16, 4)
    expected[:, 3:4] = x
    assert torch.equal(cache.cpu(), expected)


def test_a_constraint_and_its_gradient(mesh: Mesh) -> None:
    x = torch.randn(16, 8)
    made = dynaxla.shard(x, mesh, ()).requires_grad_()
    f = compiled(lambda x: dynaxla.constrain(x * 2, ("data", "model")))
    y = f(made)
    assert spec_of(y) == ("data", "model")
    y.sum().backward()
    assert_close(made.grad.cpu(), torch.full((16, 8), 2.0))
    assert spec_of(made.grad) == (None, None), "a gradient is sharded as what it is the gradient of"
    eager = dynaxla.constrain(dynaxla.shard(x, mesh, ()), ("data",))
    assert spec_of(eager) == ("data", None)
    plain = x.to("dynaxla")
    assert torch.equal(f(plain).cpu(), x * 2)
    assert dynaxla.constrain(x, ("data",)) is x
    with pytest.raises(ShardingError, match="no axis 'pipe'"):
        compiled(lambda x: dynaxla.constrain(x, ("pipe",)) + 1)(dynaxla.shard(x, mesh, ("data",)))
    with pytest.raises(ShardingError, match="for 3 dims"):
        dynaxla.constrain(x, (None, None, None))


def loop(x: Tensor, spec: Any) -> Tensor:
    """Doubles x three times."""

    def turn(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, dynaxla.constrain(x * 2, spec)

    first = torch.zeros((), dtype=torch.int64, device=x.device)
    return torch.while_loop(lambda i, x: i < 3, turn, (first, x))[1]


def branch(x: Tensor, spec: Any) -> Tensor:
    """Sines or cosines."""
    return torch.cond(
        x.sum() > 0,
        lambda x: dynaxla.constrain(x.sin(), spec),
        lambda x: dynaxla.constrain(x.cos(), spec),
        (x,),
    )


@pytest.mark.parametrize("function", [loop, branch])
def test_constraints_in_regions(mesh: Mesh, function: Callable[..., Tensor]) -> None:
    x = torch.randn(16, 8)
    made, plain = dynaxla.shard(x, mesh, ()), x.to("dynaxla")
    f = compiled(function)
    for spec in (("data",), (None, "model"), ()):
        got = f(made, spec)
        assert_close(got.cpu(), function(x, spec))
        assert spec_of(got) == (*spec, None, None)[:2], "without a constraint it is on every device, as the argument"
        assert_close(f(plain, spec).cpu(), function(x, spec))
    with pytest.raises(ShardingError, match="did you mean 'model'"):
        f(made, ("modle",))


def test_shards_are_made_between_graphs(mesh: Mesh) -> None:
    """Dynamo breaks the graph there, and traces neither this package's functions nor JAX's."""
    torch._dynamo.reset()
    x = torch.randn(8, 4)
    got = torch.compile(lambda x: dynaxla.shard(x * 2, mesh, ("data",)).sin(), backend="dynaxla")(x)
    assert_close(got.cpu(), (x * 2).sin())
    assert spec_of(got) == ("data", None)


def test_a_parameter_that_the_forward_writes_to(mesh: Mesh) -> None:
    table, ids = torch.randn(6, 8) * 3, torch.tensor([[0, 1], [2, 5]])
    there = dynaxla.shard(table, mesh, (None, "model")).requires_grad_()
    table.requires_grad_()
    expected = F.embedding(ids, table, max_norm=1.0)
    got = compiled(lambda w, i: F.embedding(i, w, max_norm=1.0))(there, ids.to("dynaxla"))
    assert_close(got.cpu(), expected)
    assert_close(there.detach().cpu(), table.detach())
    (mine,), (theirs,) = (torch.autograd.grad(y.square().sum(), w) for y, w in ((got, there), (expected, table)))
    assert_close(mine.cpu(), theirs)


def test_the_gradient_of_a_constraint_in_a_branch(mesh: Mesh) -> None:
    x = torch.randn(16, 8)
    made, host = dynaxla.shard(x, mesh, ("data",)).requires_grad_(), x.clone().requires_grad_()
    compiled(lambda x: branch(x, (None, "model")))(made).square().sum().backward()
    branch(host, (None, "model")).square().sum().backward()
    assert_close(made.grad.cpu(), host.grad)


def test_the_report_lists_collectives(mesh: Mesh) -> None:
    f = compiled(lambda x: x.sum())
    f(dynaxla.shard(torch.randn(16, 8), mesh, ("data",)))
    assert "(arguments on data=2xmodel=4: 1 ('data', None)): 1 all-reduce of 4 bytes" in dynaxla.report()


class Block(nn.Module):
    """Attention of four heads and a gated net, as in a decoder: [batch, length, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, 4, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = (q @ k.mT * 0.5).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, 16))
        return x + self.down(F.silu(self.up(x)))


TENSOR_PARALLEL = {
    r"(q|k|v|up)\.weight": ("model", None),
    "out.weight": (None, "model"),
    "down.weight": (None, "model"),
}


def plain_jax(weights: dict[str, Any], x: Any) -> Any:
    """`Block`, written in JAX."""
    batch, length, _ = x.shape
    shape = (batch, length, 4, 4)
    q, k, v = (jnp.swapaxes((x @ weights[f"{name}.weight"].T).reshape(shape), 1, 2) for name in "qkv")
    attended = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) * 0.5, -1) @ v
    x = x + jnp.swapaxes(attended, 1, 2).reshape(batch, length, 16) @ weights["out.weight"].T
    return x + jax.nn.silu(x @ weights["up.weight"].T) @ weights["down.weight"].T


def test_attention_in_buckets(mesh: Mesh) -> None:
    torch.manual_seed(0)
    host = Block()
    block = copy.deepcopy(host)
    dynaxla.shard(block, mesh, TENSOR_PARALLEL, axis="model")
    run = compiled(block, dynamic=True)
    for length in (5, 7, 11, 6):
        x = torch.randn(4, length, 16)
        got, expected = run(dynaxla.shard(x, mesh, ("data",))), host(x)
        assert_close(got.detach().cpu(), expected.detach())
        got.square().sum().backward()
        expected.square().sum().backward()
        for ours, theirs in zip(block.parameters(), host.parameters(), strict=True):
            assert_close(ours.grad.cpu(), theirs.grad)


@torch.no_grad()
def test_a_tensor_parallel_block_has_two_all_reduces() -> None:
    mesh = dynaxla.make_mesh((4,), ("model",))
    block = dynaxla.shard(Block(), mesh, TENSOR_PARALLEL)
    x = dynaxla.shard(torch.randn(4, 8, 16), mesh, ())
    run = compiled(block)
    assert collectives_of(lambda: run(x)) == {"all-reduce": 2}


def test_data_parallel_gradients_have_one_all_reduce() -> None:
    mesh = dynaxla.make_mesh((8,), ("data",))
    block = dynaxla.shard(Block(), mesh, {})
    x = dynaxla.shard(torch.randn(8, 8, 16), mesh, ("data",))
    y = compiled(block)(x)
    found = collectives_of(lambda: (y.backward(torch.ones_like(y)), y)[1])
    assert found == {"all-reduce": 1}, "all gradients together"


def test_fully_sharded_parameters_are_gathered_and_gradients_scattered() -> None:
    """XLA's CPU compiler writes a reduce-scatter as an all-reduce and a slice."""
    mesh = dynaxla.make_mesh((8,), ("data",))
    block = dynaxla.fully_shard(Block(), mesh, "data")
    x = dynaxla.shard(torch.randn(8, 8, 16), mesh, ("data",))
    run = compiled(block)
    with torch.no_grad():
        forward = collectives_of(lambda: run(x))
    assert forward == {"all-gather": 6}
    y = run(x)
    backward = collectives_of(lambda: (y.sum().backward(), y)[1])
    assert backward["all-gather"] <= 6
    assert backward["all-reduce"] + backward["reduce-scatter"] >= 1
    assert set(backward) <= {"all-gather", "all-reduce", "reduce-scatter"}


MESHES = {
    "data": ((4,), ("data",)),
    "tensor": ((4,), ("model",)),
    "fully": ((4,), ("data",)),
    "mixed": ((2, 2), ("data", "model")),
}
WAYS = pytest.mark.parametrize("way", MESHES)


@dataclass(frozen=True)
class SameInJax:
    """A block on a mesh, and the counts of collectives that JAX's compiler gives `plain_jax` with the same shardings."""

    block: Block
    x: Tensor
    weights: dict[str, NamedSharding]
    batch: NamedSharding

    @classmethod
    def place(cls, way: str) -> SameInJax:
        torch.manual_seed(0)
        mesh = dynaxla.make_mesh(*MESHES[way])
        block, x = Block(), torch.randn(4, 8, 16)
        dynaxla.shard(block, mesh, TENSOR_PARALLEL if "model" in mesh.axes else {})
        if way in ("fully", "mixed"):
            dynaxla.fully_shard(block, mesh, "data")
        made = dynaxla.shard(x, mesh, ("data",) if "data" in mesh.axes else ())
        devices: MeshDevices = device_in_use().client.mesh_devices
        named = {name: devices.to_named(dynaxla.sharding(value)) for name, value in block.named_parameters()}
        return cls(block, made, named, devices.to_named(dynaxla.sharding(made)))

    @property
    def shapes(self) -> tuple[dict[str, Any], Any]:
        def describe(value: Tensor, sharding: NamedSharding) -> Any:
            return jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=sharding)

        weights = {name: describe(value, self.weights[name]) for name, value in self.block.named_parameters()}
        return weights, describe(self.x, self.batch)

    def count_in_gradient(self) -> Counter[str]:
        """In JAX's gradient, one program."""
        gradient = jax.grad(lambda weights, x: jnp.sum(jnp.square(plain_jax(weights, x))))
        return _count(jax.jit(gradient, out_shardings=self.weights).lower(*self.shapes).compile())

    def count_in_two(self) -> tuple[Counter[str], Counter[str]]:
        """In `jax.vjp` and its pullback, which takes what the forward keeps, sharded as the forward gives it."""
        forward = jax.jit(lambda weights, x: jax.vjp(lambda weights: plain_jax(weights, x), weights))
        compiled = forward.lower(*self.shapes).compile()
        given = jax.eval_shape(forward, *self.shapes)
        cotangent, pullback = jax.tree.map(
            lambda value, sharding: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding),
            given,
            jax.tree.unflatten(jax.tree.structure(given), jax.tree.leaves(compiled.output_shardings)),
        )
        backward = jax.jit(lambda pull, cotangent: pull(cotangent)[0], out_shardings=self.weights)
        return _count(compiled), _count(backward.lower(pullback, cotangent).compile())


def _count(compiled: Any) -> Counter[str]:
    return Counter(each.kind for each in list_collectives(compiled.as_text()))


@WAYS
def test_collectives_of_forward_and_backward_are_those_of_jax(way: str) -> None:
    """Two programs here, `jax.vjp` and its pullback there: as many collectives of each kind in each."""
    same = SameInJax.place(way)
    run = compiled(same.block)
    kept = list[Tensor]()
    forward = collectives_of(lambda: kept.append(run(same.x)) or kept)
    cotangent = torch.ones_like(kept[0])
    backward = collectives_of(lambda: kept[0].backward(cotangent) or kept)
    assert (forward, backward) == same.count_in_two()


@WAYS
def test_collectives_of_a_whole_step_are_those_of_jax(way: str) -> None:
    """Forward, backward and update in one graph: as many collectives of each kind as in JAX's gradient."""
    same = SameInJax.place(way)
    parameters = list(same.block.parameters())

    def step(x: Tensor) -> Tensor:
        loss = same.block(x).square().sum()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-0.1)
        return loss.detach()

    host, before = copy.deepcopy(same.block).to("cpu"), [spec_of(each) for each in parameters]
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        found = collectives_of(lambda: compiled(step, fullgraph=True)(same.x))
    assert found == same.count_in_gradient()
    assert [spec_of(each) for each in parameters] == before
    gradients = torch.autograd.grad(host(same.x.cpu()).square().sum(), list(host.parameters()))
    for ours, theirs, gradient in zip(parameters, host.parameters(), gradients, strict=True):
        assert_close(ours.detach().cpu(), (theirs - 0.1 * gradient).detach())


def test_memory_of_a_device_is_its_share(mesh: Mesh) -> None:
    """Parameters and states of the optimizer of a fully sharded net."""
    flat = dynaxla.make_mesh((8,), ("data",))
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    whole = sum(value.nbytes for value in net.parameters())
    dynaxla.fully_shard(net, flat, "data")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
    run = compiled(lambda x: net(x).square().mean())
    for _ in range(2):
        run(dynaxla.shard(torch.randn(16, 256), flat, ("data",))).backward()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [value.grad for value in net.parameters()]
    held = [storage_of(value).buffer for value in (*net.parameters(), *states, *gradients)]
    here = sum(buffer.addressable_shards[0].data.nbytes for buffer in held)
    assert here <= 1.1 * 4 * whole / 8, (here, whole)
