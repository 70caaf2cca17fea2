"""What the wall relies on of operators, their Python kernels, decompositions and formulas, and of nested arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from dynaxla.torch_api import (
    autocast_lists,
    custom_ops,
    decompositions,
    mutation_schema,
    overloads,
    python_kernels,
    pytree,
    tracing,
)
from dynaxla.torch_api.fakes import FakeTensorMode
from tests.torch_api.boundary import boundary

aten = torch.ops.aten


@boundary("overloads.OpOverload", "overloads.HigherOrderOperator")
def test_overloads_and_higher_order_operators_are_told_apart() -> None:
    assert isinstance(aten.sum.dim_IntList, overloads.OpOverload)
    assert not isinstance(aten.sum, overloads.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, overloads.HigherOrderOperator)
    assert not isinstance(torch.ops.higher_order.cond, overloads.OpOverload)


@boundary("overloads.parameters", "overloads.results")
def test_a_schema_has_parameters_and_results() -> None:
    found = overloads.parameters(aten.sum.dim_IntList)
    assert [p.name for p in found] == ["self", "dim", "keepdim", "dtype"]
    assert [p.kwarg_only for p in found] == [False, False, False, True]
    assert [p.default_value for p in found[2:]] == [False, None]
    assert "Tensor" in str(found[0].real_type)
    assert "ScalarType" in str(found[3].real_type)
    assert len(overloads.results(aten.max.dim)) == 2
    assert len(overloads.results(aten._assert_async.msg)) == 0


@boundary("overloads.takes_sizes")
def test_a_schema_says_which_numbers_are_sizes() -> None:
    def sizes(op: overloads.OpOverload) -> list[str]:
        return [parameter.name for parameter in overloads.parameters(op) if overloads.takes_sizes(parameter)]

    assert sizes(aten.view.default) == ["size"]
    assert sizes(aten.permute.default) == sizes(aten.sum.dim_IntList) == []
    assert sizes(aten.slice.Tensor) == ["start", "end", "step"]


@boundary(
    "overloads.get_schema", "overloads.family", "overloads.namespace", "overloads.base_name", "overloads.full_name"
)
def test_an_operator_has_its_names() -> None:
    assert overloads.get_schema(aten.relu.default) == "aten::relu(Tensor self) -> Tensor"
    op = aten.sum.dim_IntList
    assert (overloads.family(op), overloads.base_name(op), overloads.full_name(op)) == (
        "aten::sum",
        "sum",
        "aten::sum.dim_IntList",
    )
    assert overloads.full_name(aten.relu.default) == "aten::relu"
    assert [overloads.namespace(each) for each in (op, aten.sum, torch.sum)] == ["aten", "aten", None]


@boundary("overloads.REGIONS", "overloads.is_named_by_digest", "overloads.stable_name")
def test_a_name_may_say_what_is_computed() -> None:
    library = torch.library.Library(overloads.REGIONS, "FRAGMENT")
    try:
        library.define("loop_7.of_abc(Tensor x) -> Tensor")
        library.define("loop_8(Tensor x) -> Tensor")
        named = getattr(torch.ops, overloads.REGIONS)
        assert overloads.is_named_by_digest(named.loop_7.of_abc)
        assert overloads.stable_name(named.loop_7.of_abc) == "dynaxla_regions.of_abc"
        assert not overloads.is_named_by_digest(named.loop_8.default)
        assert overloads.stable_name(named.loop_8.default) == "dynaxla_regions.loop_8.default"
    finally:
        library._destroy()
    assert not overloads.is_named_by_digest(torch.ops.aten.sum.dim_IntList)
    assert overloads.stable_name(torch.ops.aten.sum.dim_IntList) == "aten.sum.dim_IntList"


@boundary("overloads.changes_arguments", "overloads.aliases_arguments", "overloads.gives_view")
def test_a_schema_says_what_is_written_and_what_is_shared() -> None:
    assert [overloads.changes_arguments(op) for op in (aten.add_.Tensor, aten.view.default)] == [True, False]
    assert [overloads.aliases_arguments(op) for op in (aten.add_.Tensor, aten.view.default, aten.add.Tensor)] == [
        True,
        True,
        False,
    ]
    views = (aten.view.default, aten.split.Tensor, aten.add_.Tensor, aten.add.Tensor, aten._assert_async.msg)
    assert [overloads.gives_view(op) for op in views] == [True, True, False, False, False]


@boundary("mutation_schema.version_counter_of")
def test_the_dispatcher_says_who_raises_versions() -> None:
    ops = (aten.add_.Tensor, aten._foreach_add_.Scalar, aten._fused_adam_.default)
    assert [mutation_schema.version_counter_of(op) for op in ops] == ["torch", "parts", "nobody"]


@boundary("mutation_schema.may_write_to_lazy")
def test_kernels_of_products_get_lazy_conjugates() -> None:
    ops = (aten.mm.out, aten.addmm_.default, aten.neg_.default, aten.mul.out, aten.add_.Tensor)
    assert list(map(mutation_schema.may_write_to_lazy, ops)) == [True, True, True, False, False]


@boundary("autocast_lists.autocast_state")
def test_torch_says_for_which_devices_autocast_is_on() -> None:
    assert autocast_lists.autocast_state() == []
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_lists.autocast_state() == [("cpu", torch.bfloat16)]


@boundary("overloads.is_composite", "overloads.is_defined", "overloads.overloads_named")
def test_the_dispatcher_knows_operators() -> None:
    assert overloads.is_composite(aten.matmul.default)
    assert not overloads.is_composite(aten.mm.default)
    assert overloads.is_defined("aten::sum.dim_IntList")
    assert not overloads.is_defined("aten::no_such_op")
    found = set(overloads.overloads_named("aten::_foreach_add"))
    assert {aten._foreach_add.List, aten._foreach_add_.Scalar} <= found
    assert aten.add.Tensor not in found


@boundary(
    "custom_ops.CustomOpDef",
    "custom_ops.overload_of",
    "custom_ops.list_custom_ops",
    "custom_ops.formula_of",
    "custom_ops.python_function_of",
)
def test_a_custom_operator_has_its_overload_and_its_formula() -> None:
    @torch.library.custom_op("dynaxla_wall::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    def formula(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2

    assert isinstance(double, custom_ops.CustomOpDef)
    op = custom_ops.overload_of(double)
    assert op is torch.ops.dynaxla_wall.double.default
    assert "dynaxla_wall::double" in custom_ops.list_custom_ops()
    assert custom_ops.formula_of(op) is None
    x = torch.ones(2)
    assert torch.equal(custom_ops.python_function_of(op)(x), x * 2)  # type: ignore[misc]
    assert custom_ops.python_function_of(aten.sin.default) is None
    torch.library.register_autograd(op, formula)
    assert custom_ops.formula_of(op) is formula


@boundary("custom_ops.formula_of", "custom_ops.NATIVE")
def test_an_operator_of_a_library_has_a_formula_where_it_has_a_kernel() -> None:
    library = torch.library.Library("dynaxla_wall_library", "FRAGMENT")
    library.define("one(Tensor x) -> Tensor")
    op = torch.ops.dynaxla_wall_library.one.default
    assert custom_ops.formula_of(op) is None
    library.impl("one", lambda x: x, "Autograd")
    assert custom_ops.formula_of(op) is custom_ops.NATIVE


@boundary(
    "python_kernels.python_kernels",
    "python_kernels.replace_python_kernels",
    "python_kernels.AUTOGRAD",
    "python_kernels.COMPOSITE",
    "python_kernels.FAKE",
)
def test_python_kernels_take_an_ops_place_for_a_while() -> None:
    op = aten.upsample_nearest2d.vec
    before = python_kernels.python_kernels(op)
    assert before.keys() & {python_kernels.AUTOGRAD, python_kernels.COMPOSITE}, (
        "torch decomposes it before any table is asked"
    )
    x = torch.randn(1, 1, 2, 2, requires_grad=True)
    expected = op(x, [4, 4], None)
    changes = {op: dict.fromkeys((python_kernels.AUTOGRAD, python_kernels.COMPOSITE), lambda x, *_: x.neg())}
    with python_kernels.replace_python_kernels(changes), enable_python_dispatcher():
        torch.testing.assert_close(op(x, [4, 4], None), -x)
    assert python_kernels.python_kernels(op) == before
    torch.testing.assert_close(op(x, [4, 4], None), expected)
    with python_kernels.replace_python_kernels(
        {op: dict.fromkeys((python_kernels.AUTOGRAD, python_kernels.COMPOSITE))}
    ):
        assert not python_kernels.python_kernels(op).keys() & {python_kernels.AUTOGRAD, python_kernels.COMPOSITE}
    gradient = aten.upsample_nearest2d_backward.default
    with (
        python_kernels.replace_python_kernels({gradient: {python_kernels.FAKE: lambda grad, *_: grad[0]}}),
        enable_python_dispatcher(),
    ):
        assert gradient(x.detach().to("meta"), [4, 4], [1, 1, 2, 2]).shape == (1, 2, 2)


@boundary("python_kernels.make_autograd_kernel")
def test_torchs_own_derivative_is_there_behind_a_python_kernel() -> None:
    op = aten.index_put_.default
    x, value = torch.zeros(3, requires_grad=True), torch.ones((), requires_grad=True)
    asked: list[Any] = []

    def kernel(*args: Any) -> Tensor:
        asked.append(args)
        return python_kernels.make_autograd_kernel(op)(*args)  # type: ignore[no-any-return]

    with python_kernels.replace_python_kernels({op: {python_kernels.AUTOGRAD: kernel}}), enable_python_dispatcher():
        y = x * 2
        y[torch.tensor([1, 2])] = value
        gradients = torch.autograd.grad(y.sum(), [x, value])
    assert [gradient.tolist() for gradient in gradients] == [[2, 0, 0], 2]
    assert len(asked) == 1


@boundary("python_kernels.make_composite_kernel")
def test_torchs_own_way_to_take_an_op_apart_is_there_behind_a_python_kernel() -> None:
    op, x = aten.scaled_dot_product_attention.default, torch.randn(2, 3, 4)
    expected = op(x, x, x)

    def kernel(*args: Any) -> Tensor:
        return python_kernels.make_composite_kernel(op)(*args)  # type: ignore[no-any-return]

    changes = {op: dict.fromkeys((python_kernels.COMPOSITE, python_kernels.AUTOGRAD), kernel)}
    with python_kernels.replace_python_kernels(changes), enable_python_dispatcher():
        assert torch.equal(op(x, x, x), expected)


@boundary("python_kernels.python_kernels")
def test_margin_losses_are_decomposed_by_python_kernels() -> None:
    for op in (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default):
        assert python_kernels.AUTOGRAD in python_kernels.python_kernels(op)


@boundary("decompositions.core_decompositions", "decompositions.decompositions_of")
def test_torch_has_decompositions() -> None:
    x = torch.randn(3, 4)
    of_core = decompositions.core_decompositions()
    torch.testing.assert_close(of_core[aten.silu.default](x), torch.nn.functional.silu(x))
    found = decompositions.decompositions_of([aten.std, aten.squeeze.dims])
    assert {aten.std.correction, aten.squeeze.dims} <= found.keys()
    torch.testing.assert_close(found[aten.std.correction](x), x.std())


@boundary("decompositions.has_decomposition", "decompositions.decomposition_calls")
def test_decompositions_are_calls_of_aten() -> None:
    """Whatever runs around them: autocast would compute a product in bfloat16, and grad would keep what backward needs."""
    assert not decompositions.has_decomposition(aten.mm.default)
    assert decompositions.has_decomposition(aten.addmv.default)
    with FakeTensorMode() as mode:
        matrix, vector = torch.empty(2, 3, requires_grad=True), torch.empty(3)
    with torch.autocast("cpu", torch.bfloat16), mode:
        graph = decompositions.decomposition_calls(aten.addmv.default, (vector[:2], matrix, vector), {})
    assert len(graph.find_nodes(op="placeholder")) == 3
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert {node.target.namespace for node in made} == {"aten"}
    assert {node.meta["val"].dtype for node in made} == {torch.float32}
    (result,) = graph.output_node().args[0]
    assert tuple(result.meta["val"].shape) == (2,)


@boundary("decompositions.decomposition_calls")
def test_operands_that_share_a_fake_tensor_are_two() -> None:
    with FakeTensorMode():
        shared = torch.empty(3)
        graph = decompositions.decomposition_calls(aten.mse_loss.default, (shared, shared, 0), {})
    difference = next(node for node in graph.nodes if node.target == aten.sub.Tensor)
    assert list(difference.args) == graph.find_nodes(op="placeholder")


@boundary("decompositions.MULTIPLY_ADD")
def test_dynamo_writes_addcmul_so() -> None:
    x, y, z = torch.randn(3, 4).unbind()
    torch.testing.assert_close(decompositions.MULTIPLY_ADD(x, y, z), x * y + z)


@boundary("decompositions.compute_output_size")
def test_upsampling_computes_its_size() -> None:
    assert list(decompositions.compute_output_size((1, 1, 4, 6), None, [2.0, 0.5])) == [8, 3]
    assert list(decompositions.compute_output_size((1, 1, 4, 6), [5, 7], None)) == [5, 7]


@boundary("decompositions.is_native_convolution")
def test_the_kernels_of_a_convolution_are_known() -> None:
    settings = [[6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    x, weight = torch.randn(8, 4, 32, 32), torch.randn(6, 4, 3, 3)  # 1 x 1 is torch's own on one thread
    assert decompositions.is_native_convolution(x.double(), weight.double(), *settings)
    assert decompositions.is_native_convolution(x, weight, *settings) != torch.backends.mkldnn.is_available()


@boundary("decompositions.get_computation_dtype", "decompositions.suggest_memory_format")
def test_eager_computes_in_wider_dtypes_and_keeps_layouts() -> None:
    wide = decompositions.get_computation_dtype
    assert [wide(d) for d in (torch.bfloat16, torch.float16, torch.float64)] == [torch.float32] * 2 + [torch.float64]
    x = torch.randn(2, 3, 4, 5)
    assert decompositions.suggest_memory_format(x) == torch.contiguous_format
    assert decompositions.suggest_memory_format(x.to(memory_format=torch.channels_last)) == torch.channels_last


@boundary("tracing.TorchDispatchMode")
def test_a_mode_sees_every_op_of_its_block() -> None:
    class Seen(tracing.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Seen():
        torch.ones(2).add(1).sum()
    assert seen == [torch.ops.aten.ones.default, torch.ops.aten.add.Tensor, torch.ops.aten.sum.default]


@boundary(
    "pytree.TreeSpec",
    "pytree.keystr",
    "pytree.tree_flatten",
    "pytree.tree_flatten_with_path",
    "pytree.tree_unflatten",
    "pytree.tree_leaves",
    "pytree.tree_map_only",
)
def test_nested_arguments_are_flat_lists_and_back() -> None:
    nested = (1, {"a": [2, 3.0]}, None)
    leaves, tree = pytree.tree_flatten(nested)
    assert leaves == pytree.tree_leaves(nested) == [1, 2, 3.0, None]
    assert isinstance(tree, pytree.TreeSpec)
    assert pytree.tree_unflatten(leaves, tree) == nested
    assert pytree.tree_map_only(int, str, nested) == ("1", {"a": ["2", 3.0]}, None)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(nested)[0]]
    assert paths == ["[0]", "[1]['a'][0]", "[1]['a'][1]", "[2]"]


@boundary("overloads.UNSAFE_VIEWS")
def test_views_that_torch_does_not_call_views() -> None:
    x = torch.zeros(2, 3)
    calls = (aten._unsafe_view.default(x, [3, 2]), aten.unsafe_split.Tensor(x, 1)[1])
    for made in (*calls, aten.unsafe_split_with_sizes.default(x, [1, 1])[0]):
        assert made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert not made._is_view()
    assert not any(map(overloads.gives_view, overloads.UNSAFE_VIEWS))
