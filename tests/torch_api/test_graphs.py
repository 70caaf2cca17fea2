"""What the wall relies on of AOTAutograd and of fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dynaxla.torch_api import aot, fakes, meta_kernels, pytree
from tests.torch_api.boundary import boundary

aten = torch.ops.aten
Look = Callable[[GraphModule], Any]


def _inference(look: Look, function: Callable[..., Any], *args: Any) -> Any:
    """What is seen from within the compiler of a graph that AOTAutograd gives."""
    seen = []

    def compiler(module: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(look(module))
        return aot.box_function(lambda args: list(module.forward(*args)))

    with torch.no_grad():
        torch.compile(function, backend=aot.aot_autograd(fw_compiler=compiler, inference_compiler=compiler))(*args)
    (found,) = seen
    return found


def _cut(look: Look, function: Callable[..., Any], *args: Any) -> tuple[Any, GraphModule, GraphModule]:
    """What is seen of a joint graph before it is cut, and the forward and the backward."""
    seen: list[Any] = []

    def partition(joint: GraphModule, inputs: Any, **given: Any) -> Any:
        seen.append(look(joint))
        seen.extend(aot.default_partition(joint, inputs, **given))
        return seen[1:]

    def compiler(module: GraphModule, inputs: Sequence[Any]) -> Any:
        return aot.box_function(lambda args: list(module.forward(*args)))

    backend = aot.aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler, partition_fn=partition
    )
    torch.compile(function, backend=backend)(*args).sum().backward()
    found, forward, backward = seen
    return found, forward, backward


@boundary("aot.aot_autograd", "aot.box_function")
def test_aotautograd_gives_functional_graphs_of_aten_ops() -> None:
    def targets(module: GraphModule) -> list[Any]:
        return [node.target for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor)]

    x = torch.ones(3)
    assert _inference(targets, lambda x: x.add_(1), x) == [aten.add.Tensor]
    assert x.tolist() == [2, 2, 2], "what a graph writes into an input is copied there"
    values = _inference(lambda m: [n.meta["val"] for n in m.graph.nodes if n.op != "output"], lambda x: x * 2, x)
    assert all(isinstance(value, fakes.FakeTensor) for value in values)


@boundary("aot.box_function")
def test_a_boxed_function_is_given_its_arguments_as_a_list() -> None:
    given = []

    def compiler(module: GraphModule, inputs: Sequence[Any]) -> Any:
        return aot.box_function(lambda args: given.append(args) or list(module.forward(*args)))

    backend = aot.aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
    with torch.no_grad():
        torch.compile(lambda x, y: x + y, backend=backend)(torch.ones(2), torch.ones(2))
    assert type(given[0]) is list
    assert len(given[0]) == 2


class _Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += x
        y.contiguous().t_()  # changes y, which is contiguous
        return x * self.weight


@boundary("aot.get_forward_inputs", "aot.GraphInputs", "aot.InputWrite")
def test_inputs_are_known_as_weights_and_as_written() -> None:
    def look(module: GraphModule) -> Any:
        inputs = aot.get_forward_inputs()
        assert inputs is not None
        results = module.graph.output_node().args[0]
        sizes = [tuple(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
        changed = {
            (sizes[w.input], w.data, w.metadata, tuple(results[w.result].meta["val"].shape))  # type: ignore[index, union-attr]
            for w in inputs.writes
        }
        return sorted(sizes[i] for i in inputs.static), changed

    static, changed = _inference(look, _Writing(), torch.ones(3), torch.ones(2, 5))
    assert static == [(3,), (3,)]  # the weight and the buffer
    assert changed == {((3,), True, False, (3,)), ((2, 5), False, True, (5, 2))}
    assert aot.get_forward_inputs() is None


@boundary("aot.is_forward", "aot.is_backward", "aot.default_partition", "aot.PART_OF_JOINT")
def test_the_joint_graph_tells_forward_from_backward() -> None:
    def look(joint: GraphModule) -> Any:
        calls = joint.graph.find_nodes(op="call_function", target=aten.sin.default)
        cosines = joint.graph.find_nodes(op="call_function", target=aten.cos.default)
        assert all(aot.PART_OF_JOINT in node.meta for node in (*calls, *cosines))
        return [[(aot.is_forward(n), aot.is_backward(n)) for n in nodes] for nodes in (calls, cosines)]

    found, forward, backward = _cut(look, torch.sin, torch.ones(3, requires_grad=True))
    assert found == [[(True, False)], [(False, True)]]
    assert len(forward.graph.find_nodes(op="call_function", target=aten.sin.default)) == 1
    assert len(backward.graph.find_nodes(op="call_function", target=aten.cos.default)) == 1


@boundary("aot.module_path")
def test_nodes_know_the_module_that_they_compute_for() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList([torch.nn.Sigmoid()])

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[0](x).sin()

    def look(joint: GraphModule) -> dict[object, set[str]]:
        calls = [node for node in joint.graph.nodes if node.op == "call_function"]
        return {each.target: {aot.module_path(n) for n in calls if n.target is each.target} for each in calls}

    found, forward, backward = _cut(look, Outer(), torch.ones(3, requires_grad=True))
    assert found[aten.sigmoid.default] == {"inner.0"}
    assert found[aten.sin.default] == {""}
    (gradient,) = backward.graph.find_nodes(op="call_function", target=aten.sigmoid_backward.default)
    (value,) = forward.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
    assert (aot.module_path(gradient), aot.module_path(value)) == ("inner.0", "inner.0")


@boundary("aot.mark_backward")
def test_a_node_can_be_put_into_the_backward() -> None:
    def look(joint: GraphModule) -> None:
        (cosine,) = joint.graph.find_nodes(op="call_function", target=aten.cos.default)
        with joint.graph.inserting_before(cosine):
            made = joint.graph.call_function(aten.view.default, (cosine.args[0], [3]))
        made.meta = {"val": cosine.meta["val"]}
        cosine.replace_input_with(cosine.args[0], made)
        aot.mark_backward(made)
        assert aot.is_backward(made)

    _, forward, backward = _cut(look, torch.sin, torch.ones(3, requires_grad=True))
    assert not forward.graph.find_nodes(op="call_function", target=aten.view.default)
    assert len(backward.graph.find_nodes(op="call_function", target=aten.view.default)) == 1


@boundary("aot.is_checkpointed", "aot.is_recomputed", "aot.save_always")
def test_what_a_checkpoint_computes_again_may_be_saved() -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False)  # type: ignore[no-any-return]

    def save(joint: GraphModule) -> bool:
        for node in joint.graph.find_nodes(op="call_function", target=aten.exp.default):
            aot.save_always(node)
        return aot.is_checkpointed(joint.graph)

    x = torch.ones(3, requires_grad=True)
    counts = []
    for look in (lambda joint: aot.is_checkpointed(joint.graph), save):
        torch._dynamo.reset()
        found, _, backward = _cut(look, function, x)
        assert found
        counts.append(len(backward.graph.find_nodes(op="call_function", target=aten.exp.default)))
    assert counts == [1, 0]
    assert not _cut(lambda joint: aot.is_checkpointed(joint.graph), torch.sin, x)[0]


@boundary("aot.pair_replayed_draws")
def test_draws_of_a_checkpoint_are_made_again_in_the_backward() -> None:
    def squares(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5).square() * torch.rand_like(x)

    def function(x: Tensor) -> Tensor:
        return checkpoint(squares, x, use_reentrant=False)  # type: ignore[no-any-return]

    _, forward, backward = _cut(lambda joint: None, function, torch.ones(3, requires_grad=True))
    pairs = list(aot.pair_replayed_draws(forward.graph, backward.graph))
    ops = [(draw.args[0], again.args[1]) for draw, again in pairs]
    assert sorted(ops, key=str) == [(op, op) for op in (aten.native_dropout.default, aten.rand_like.default)]
    assert not list(aot.pair_replayed_draws(backward.graph, forward.graph))


@boundary("fakes.disable_modes")
def test_tensors_are_real_outside_of_modes() -> None:
    with fakes.FakeTensorMode(), fakes.disable_modes():
        assert type(torch.ones(1)) is torch.Tensor


@boundary("fakes.FakeTensor", "fakes.FakeTensorMode", "fakes.mode_of", "fakes.memory_of")
def test_fake_tensors_have_a_mode_and_share_memory() -> None:
    mode = fakes.FakeTensorMode()
    with mode:
        x = torch.empty(4, 6)
        view, copy = x.t(), x.clone()
    assert isinstance(x, fakes.FakeTensor)
    assert fakes.mode_of(view) is mode
    assert fakes.memory_of(x) == fakes.memory_of(view) != fakes.memory_of(copy)
    real = torch.ones(4)
    assert fakes.memory_of(real) == fakes.memory_of(real[1:]) != fakes.memory_of(real + 1)


@boundary("fakes.make_fake")
def test_a_fake_tensor_is_made_without_a_call() -> None:
    mode, (size, _) = fakes.make_symbolic_mode([6, 12])
    made = fakes.make_fake(mode, torch.float16, [size, 4], [1, size])
    with mode:
        called = torch.empty_strided([size, 4], [1, size], dtype=torch.float16)
        assert (made + called).stride() == (1, size)
    assert fakes.mode_of(made) is mode
    for one in (made, called):
        assert (one.shape, one.stride(), one.dtype) == ((size, 4), (1, size), torch.float16)
        assert one.device == torch.device("cpu")
    assert fakes.make_fake(mode, torch.int64, [size, 4]).stride() == (4, 1)


@boundary("meta_kernels.run_meta_kernel")
def test_meta_kernels_give_fake_tensors_of_the_mode() -> None:
    with fakes.FakeTensorMode() as mode:
        x, index, size = torch.empty(4, 6, dtype=torch.float16), torch.zeros(3, dtype=torch.int64), torch.empty(())
        conv = torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3)
    full = {"dtype": torch.bool, "device": torch.device("cpu")}
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.mul.Tensor, (x, size), {}),
        (aten.div.Tensor_mode, (8, 2), {"rounding_mode": "trunc"}),
        (aten.permute.default, (x, [1, 0]), {}),
        (aten.cat.default, ([x, x], 1), {}),
        (aten.embedding.default, (x, index), {}),
        (aten.split.Tensor, (x, 2), {}),
        (aten.full.default, ([2, 3], True), full),
        (aten.full.default, ([2, 3], 0), {"dtype": torch.float32}),
        (aten.arange.start_step, (0, 6, 2), {}),
        (aten.native_layer_norm.default, (x, [6], None, None, 1e-5), {}),
        (aten.convolution.default, (*conv, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}),
        (torch.sym_max, (3, 4), {}),
    ]
    for op, args, kwargs in calls:
        made = meta_kernels.run_meta_kernel(mode, op, args, kwargs)
        with mode:
            wanted = op(*args, **kwargs)
        for mine, theirs in zip(pytree.tree_leaves(made), pytree.tree_leaves(wanted), strict=True):
            if isinstance(theirs, Tensor):
                assert fakes.mode_of(mine) is mode
                assert (mine.dtype, mine.device, mine.stride()) == (theirs.dtype, theirs.device, theirs.stride())
                mine, theirs = mine.shape, theirs.shape
            assert mine == theirs


@boundary("meta_kernels.refuse_lossy_writes")
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_kernels_refuse_what_eager_refuses(kind: str) -> None:
    meta_kernels.refuse_lossy_writes()
    with fakes.FakeTensorMode() if kind == "fake" else torch.device("meta"):
        whole, real, rows = torch.ones(3, dtype=torch.int64), torch.ones(3), torch.ones(2, 3)
        calls = (
            lambda: whole.mul_(real),
            lambda: aten.mul_.Tensor(whole, real),
            lambda: whole.logit_(),
            lambda: torch._foreach_mul_([whole], [real]),
        )
        for call in calls:
            with pytest.raises(RuntimeError, match="can't be cast"):
                call()
        assert real.mul_(whole) is real
        with pytest.raises(RuntimeError, match="output with shape"):
            real.ldexp_(rows)


@boundary("fakes.captured_value")
def test_nodes_of_dynamos_graphs_have_fake_values() -> None:
    seen = []

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.extend(map(fakes.captured_value, module.graph.nodes))
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    given, made, output = seen
    assert isinstance(given, Tensor)
    assert isinstance(made, Tensor)
    assert output is None


@boundary("fakes.is_view", "fakes.get_view_base")
@pytest.mark.parametrize("fake", [False, True])
def test_autograd_knows_views(fake: bool) -> None:
    x = torch.ones(4)
    if fake:
        x = fakes.FakeTensorMode().from_tensor(x)
    view = x[1:].view(3, 1)
    assert fakes.is_view(view)
    assert fakes.get_view_base(view) is x
    assert not fakes.is_view(x)
    assert fakes.get_view_base(x) is x


class Token(OpaqueBase):
    """An object that graphs hand on."""


register_opaque_type(Token, typ="reference")


@torch.library.custom_op("wall_tests::shown", mutates_args=())
def shown(x: Tensor, token: Token) -> Tensor:
    return x.clone()


@shown.register_fake
def _fake_shown(x: Tensor, token: Token) -> Tensor:
    return torch.empty_like(x)


@boundary("fakes.find_opaque_class")
def test_objects_among_a_graphs_inputs_have_a_class() -> None:
    found = _inference(
        lambda module: [fakes.find_opaque_class(n.meta.get("val")) for n in module.graph.find_nodes(op="placeholder")],
        shown,
        torch.ones(3),
        Token(),
    )
    assert sorted(found, key=str) == [None, "Token"]
    assert fakes.find_opaque_class(Token()) == "Token"
    assert [fakes.find_opaque_class(value) for value in (3, 0.5, None, torch.ones(3), (Token(),))] == [None] * 5


@boundary("aot.keep_known_sizes")
def test_a_trace_finds_a_size_that_it_has_not_met() -> None:
    aot.keep_known_sizes()

    def strange(x: Tensor) -> Tensor:
        size: Any = x.shape[0]
        node = SymNode(size.node.expr, size.node.shape_env, int, size.node.hint)
        stranger: Any = torch.SymInt(node)
        torch.sym_max(stranger, 1)
        return x.new_zeros(stranger)

    made = make_fx(strange, tracing_mode="symbolic")(torch.ones(5))
    assert made(torch.ones(7)).shape == (7,)


@boundary("fakes.is_erased")
def test_nodes_know_that_they_are_erased() -> None:
    graph: Graph = symbolic_trace(lambda x: x + 1).graph
    (node,) = graph.find_nodes(op="placeholder")
    made = graph.call_function(torch.sin, (node,))
    assert not fakes.is_erased(made)
    graph.erase_node(made)
    assert fakes.is_erased(made)


@boundary("fakes.make_uncached_mode")
def test_a_mode_leaves_nothing_of_its_ops_in_torch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dynaxla.torch_api.fakes import make_uncached_mode

    def kept_of(mode: FakeTensorMode) -> int:
        FakeTensorMode.cache_clear()
        with mode:
            torch.empty(3) + 1
        return FakeTensorMode.cache_info().size

    assert kept_of(FakeTensorMode()) > 0
    assert kept_of(make_uncached_mode()) == 0


@boundary("fakes.drop_graph_sources")
def test_sources_of_graph_modules_stay_in_torch() -> None:
    from dynaxla.torch_api.fakes import drop_graph_sources

    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    sources = torch.fx.graph_module._loader.eval_cache
    torch.fx.symbolic_trace(run)
    before = len(sources)
    with drop_graph_sources():
        torch.fx.symbolic_trace(run)
        assert len(sources) > before
    assert len(sources) == before
    torch.fx.symbolic_trace(run)
    assert len(sources) > before


def write(x: Tensor, w: Tensor) -> Tensor:
    y = (x * w).sin()
    x.mul_(2)
    return y


def detach(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    z = y.sin()
    y.detach_()
    return z


@boundary("aot.is_overwritten")
@pytest.mark.parametrize("lose", [write, detach])
def test_autograd_says_that_a_saved_value_is_lost(lose: Callable[[Tensor, Tensor], Tensor]) -> None:
    def capture(module: GraphModule, inputs: Sequence[Any]) -> Any:
        with pytest.raises(RuntimeError) as caught:
            aot.aot_autograd(fw_compiler=lambda graph, _: graph)(module, inputs)
        assert aot.is_overwritten(caught.value)
        assert not aot.is_overwritten(RuntimeError("another"))
        return module.forward

    torch._dynamo.reset()
    torch.compile(lose, backend=capture)(torch.randn(3), torch.randn(3, requires_grad=True))


@boundary("aot.lacks_derivative")
def test_autograd_says_that_an_op_has_no_derivative() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(NotImplementedError) as caught:
        torch.special.zeta(x, x).sum().backward()
    assert aot.lacks_derivative(caught.value)
    assert not aot.lacks_derivative(NotImplementedError("another"))
    with pytest.raises(RuntimeError) as caught:
        x.expand(2, 3).scatter_add(1, torch.zeros(2, 1, dtype=torch.int64), x.expand(2, 3)).sum().backward()
    assert aot.lacks_derivative(caught.value)


@boundary("aot.writes_to_strided_view")
def test_functionalization_refuses_writes_to_as_strided_of_a_view() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.func.functionalize(lambda x: x.diagonal().as_strided((2,), (1,), 0).add_(1))(torch.ones(2, 4))
    assert aot.writes_to_strided_view(caught.value)
    assert not aot.writes_to_strided_view(RuntimeError("another"))


@boundary("aot.reads_number")
def test_a_number_that_an_index_reads_is_lost_in_a_trace() -> None:
    def capture(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with pytest.raises(RuntimeError, match="_local_scalar_dense") as caught:
            aot.aot_autograd(fw_compiler=lambda graph, _: graph)(module, inputs)
        assert aot.reads_number(caught.value)
        assert not aot.reads_number(RuntimeError("another"))
        return module.forward

    torch._dynamo.reset()
    torch.compile(lambda x, i: x[i], backend=capture)(torch.randn(3), torch.tensor(1))


@boundary("aot.find_counting_op", "aot.find_uncaptured_op")
def test_ops_of_unknown_shapes_cannot_be_traced() -> None:
    def capture(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with pytest.raises(RuntimeError) as caught:
            aot.aot_autograd(fw_compiler=lambda graph, _: graph)(module, inputs)
        assert aot.find_counting_op(caught.value) == "aten._unique.default"
        assert aot.find_counting_op(RuntimeError("another")) is None
        return module.forward

    torch._dynamo.reset()
    value = torch.ones((), requires_grad=True)
    torch.compile(lambda x, i, v: x.index_fill(0, i, v), backend=capture)(torch.randn(3), torch.tensor([1]), value)
    with fakes.FakeTensorMode(allow_fallback_kernels=False) as mode, pytest.raises(RuntimeError) as caught:
        torch._standard_gamma_grad(*[mode.from_tensor(torch.ones(3))] * 2)
    assert aot.find_uncaptured_op(caught.value) == "aten._standard_gamma_grad.default"


@boundary("aot.written_inputs")
def test_a_joint_graph_says_which_inputs_it_writes_to() -> None:
    def write(w: Tensor, ids: Tensor) -> Tensor:
        return functional.embedding(ids, w, max_norm=1.0)

    written: list[frozenset[int]] = []

    def split(joint: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        written.append(aot.written_inputs(joint.graph))
        return aot.default_partition(joint, inputs, **how)

    backend = aot.aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), partition_fn=split)
    torch._dynamo.reset()
    torch.compile(write, backend=backend)(torch.randn(3, 2, requires_grad=True), torch.tensor([1]))
    torch.compile(lambda w: w.sin(), backend=backend)(torch.randn(3, requires_grad=True))
    assert [len(each) for each in written] == [1, 0]
