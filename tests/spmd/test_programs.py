"""Programs over a mesh, below the tensors: what is linked, compiled, keyed and run, and the collectives that it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Graph

from dynaxla.custom_ops.constrain import CONSTRAIN
from dynaxla.errors import CompileError, ShardingError
from dynaxla.lowering.call_graph import CallGraph, GraphSharding, call_graph
from dynaxla.lowering.link import link
from dynaxla.lowering.program_keys import graph_key
from dynaxla.mesh import Mesh, Sharding, parse_dims, parse_sharding, replicate
from dynaxla.observe.collectives import list_collectives
from dynaxla.ops.table import core_table
from dynaxla.options import Limits, Options
from dynaxla.runtime.mesh_devices import MeshDevices, sharding_of
from dynaxla.runtime.packaged_programs import environment_of
from dynaxla.runtime.pjrt_clients import many_cpus
from dynaxla.runtime.topologies import PjrtTopology
from dynaxla.targets.tpu import _TO_COMPILE, tpu_identity
from dynaxla.torch_api.fakes import FakeTensorMode
from dynaxla.types import TensorSpec
from tests.precompile.test_compile_for_target import needs_libtpu
from tests.spmd.lowering import functions_of

aten = torch.ops.aten
MESH = Mesh((2, 4), ("data", "model"))


def product(constraint: str | None = None) -> CallGraph:
    """[16, 8] times [8, 12], constrained."""
    graph, mode = Graph(), FakeTensorMode()
    nodes = []
    for name, shape in (("x", (16, 8)), ("w", (8, 12))):
        node = graph.placeholder(name)
        with mode:
            node.meta = {"val": torch.empty(shape)}
        nodes.append(node)
    made = graph.call_function(aten.mm.default, tuple(nodes))
    with mode:
        made.meta = {"val": torch.empty(16, 12)}
    if constraint is not None:
        value = made.meta
        made = graph.call_function(CONSTRAIN, (made, constraint))
        made.meta = value
    graph.output((made,))
    return call_graph(graph)


def sharded(graph: CallGraph, *specs: object, result: object = None, mesh: Mesh = MESH) -> CallGraph:
    inputs = tuple(
        parse_sharding(mesh, spec, value.shape) for spec, value in zip(specs, graph.inputs.values(), strict=True)
    )
    made = None if result is None else Sharding(mesh, parse_dims(result, 2))
    return replace(graph, sharding=GraphSharding(mesh, inputs, (made,)))


def run(graph: CallGraph, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, Sharding | None, str]:
    """The result of a product over eight devices, how it is sharded, and the optimized program."""
    client = many_cpus(8)
    devices = MeshDevices(client)
    assert graph.sharding is not None
    module = link(graph, functions_of(graph)).module
    executable = client.compile(module, Options().compile_limits, graph.sharding.mesh.size)
    assert devices.set_results(executable, graph.result_specs, graph.sharding.mesh) == []
    given = [devices.put(value, sharding) for value, sharding in zip((x, w), graph.sharding.inputs, strict=True)]
    (result,) = executable.run(given)
    return devices.read(result), sharding_of(result), executable.hlo_text()


@pytest.mark.parametrize(
    ("specs", "result", "kinds"),
    [
        ((("data", None), ()), ("data", None), []),
        (((("data", "model"), None), ()), (("data", "model"), None), []),
        (((None, "model"), ("model", None)), (None, None), ["all-reduce"]),
        ((("data", None), (None, "model")), ("data", "model"), []),
    ],
)
def test_a_product_is_partitioned(specs: object, result: tuple[object, ...], kinds: list[str]) -> None:
    x, w = torch.randn(16, 8), torch.randn(8, 12)
    got, sharding, hlo = run(sharded(product(), *specs), x, w)
    torch.testing.assert_close(got, x @ w)
    assert sharding is not None
    assert sharding.spec == result
    assert [each.kind for each in list_collectives(hlo)] == kinds


def test_a_constraint_and_a_wanted_result_decide() -> None:
    x, w = torch.randn(16, 8), torch.randn(8, 12)
    plan = sharded(product("data;"), (), ())
    got, sharding, _ = run(plan, x, w)
    torch.testing.assert_close(got, x @ w)
    assert sharding is not None
    assert sharding.spec == ("data", None)
    got, sharding, hlo = run(sharded(product(), ("data", None), (), result=(None, None)), x, w)
    torch.testing.assert_close(got, x @ w)
    assert sharding == replicate(MESH, 2)
    (gathered,) = list_collectives(hlo)
    assert (gathered.kind, gathered.nbytes) == ("all-gather", 16 * 12 * 4)
    assert sorted(map(sorted, gathered.groups)) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_constraint_names_an_axis_of_the_mesh() -> None:
    plan = sharded(product("modle;"), (), ())
    with pytest.raises(ShardingError, match="did you mean 'model'"):
        link(plan, functions_of(plan))


def test_keys_have_the_mesh_and_all_shardings() -> None:
    """One key for each mesh, each sharding of an input or a result, and none that is the single device's."""
    environment = environment_of(many_cpus(8))
    plans = [
        product(),
        sharded(product(), (), ()),
        sharded(product(), (), (), mesh=Mesh((8,), ("data",))),
        sharded(product(), (), (), mesh=Mesh((2, 4), ("data", "tensor"))),
        sharded(product(), ("data",), ()),
        sharded(product(), ("model",), ()),
        sharded(product(), (("data", "model"),), ()),
        sharded(product(), (("model", "data"),), ()),
        sharded(product(), (None, "model"), ()),
        sharded(product(), (), ("model",)),
        sharded(product(), (), (), result=("data", None)),
        sharded(product(), (), (), result=()),
        sharded(product(";"), (), ()),
        sharded(product("data;"), (), ()),
    ]
    keys = [graph_key(plan, core_table(), Options(), environment) for plan in plans]
    assert None not in keys
    assert len({key.digest for key in keys if key is not None}) == len(plans)


@pytest.mark.parametrize(
    ("spec", "shape", "match"),
    [
        ("data", (8,), "is no spec"),
        (("data", "data"), (8, 8), "twice"),
        (("date",), (8,), "did you mean 'data'"),
        (("data", None, None), (8, 8), "for 3 dims"),
        ((None, "model"), (8, 6), "which 4 devices"),
        ((("data", "model"),), (12,), "which 8 devices"),
        ((3,), (8,), "3 in a spec"),
    ],
)
def test_what_is_no_spec_is_refused(spec: object, shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(ShardingError, match=match):
        parse_sharding(MESH, spec, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "axes"), [((2,), ("a", "b")), ((2, 2), ("a", "a")), ((0,), ("a",)), ((2,), ("a b",)), ((), ())]
)
def test_what_is_no_mesh_is_refused(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    with pytest.raises(ShardingError):
        Mesh(shape, axes)


def test_arrays_are_put_and_read(subtests: pytest.Subtests) -> None:
    devices = MeshDevices(many_cpus(8))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        host = torch.randint(0, 2, (8, 4)).to(dtype)
        for spec in ((), ("data",), ("data", "model"), (("model", "data"),)):
            with subtests.test(dtype=dtype, spec=spec):
                sharding = parse_sharding(MESH, spec, host.shape)
                buffer = devices.put(host, sharding)
                assert sharding_of(buffer) == sharding
                assert torch.equal(devices.read(buffer), host)
                tiles = {tuple(shard.data.shape) for shard in buffer.addressable_shards}
                assert tiles == {sharding.tile(host.shape)}
                again = devices.reshard(buffer, replicate(MESH, 2))
                assert torch.equal(devices.read(again), host)


def test_one_buffer_is_replicated_once() -> None:
    client = many_cpus(8)
    devices = MeshDevices(client)
    buffer = client.to_buffer(torch.arange(16.0))
    assert devices.replicate(buffer, MESH) is devices.replicate(buffer, MESH)
    zeros = devices.put_zeros(TensorSpec((8,), torch.float32), parse_sharding(MESH, ("data",), (8,)))
    assert devices.read(zeros).tolist() == [0.0] * 8


@needs_libtpu
def test_a_topology_compiles_for_all_its_devices() -> None:
    compiler = PjrtTopology("tpu", "v5e:2x4", _TO_COMPILE, tpu_identity)
    try:
        plan = sharded(product(), (None, "model"), ("model", None))
        module = link(plan, functions_of(plan)).module
        program = compiler.compile(module, Limits(300.0, 16 << 30), MESH.size)
        reduced = [each for each in list_collectives(program.hlo_text()) if each.kind == "all-reduce"]
        assert reduced
        assert {len(group) for group in reduced[0].groups} == {4}
        assert program.serialize()
        with pytest.raises(CompileError, match="has 8 devices, and the mesh 16"):
            compiler.compile(module, Limits(300.0, 16 << 30), 16)
    finally:
        compiler.child.close()
