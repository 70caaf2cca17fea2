"""What the records say of torch-mlir is what its sweep found, and what the choice makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from conformance.mlir_company import lost_in_company
from conformance.mlir_findings import disagreement, findings
from conformance.mlir_record import Line, read
from conformance.mlir_run import Lowering
from conformance.op_calls import Call
from conformance.varied_calls import BEYOND, varied
from dynaxla.custom_ops import internal
from dynaxla.custom_ops.process_collectives import COLLECTIVES
from dynaxla.isolation.failures import KnownFailures
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.torch_dialect import single_call_graph
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.table import core_table
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict
from dynaxla.torch_api.fakes import FakeTensorMode
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims


def test_records_say_what_the_sweep_found() -> None:
    records = {str(target): record for target, record in core_table().records.items()}
    swept = read()
    of_processes = {str(target) for target in COLLECTIVES}  # of which one process can make no call
    assert set(swept) == set(records) - of_processes
    assert [told for name, lines in swept.items() for told in disagreement(records[name], lines)] == []


def test_indices_that_eager_must_not_see_and_values_at_the_edges_are_offered() -> None:
    x, index = torch.randn(3, 4), torch.tensor([0, 2])
    (calls,) = varied({aten.index_select.default: [_concrete(aten.index_select.default, x, 0, index)]}).values()
    assert {call.leaves[2][0].item() for call in calls if call.beyond_eager} == {BEYOND, -BEYOND}
    values = torch.cat([call.leaves[0].flatten() for call in calls])
    assert values.isnan().any()
    assert values.isinf().any()


def test_what_loses_roundings_in_company_is_seen() -> None:
    x = torch.linspace(-3, 3, 64, dtype=torch.bfloat16)
    lowering = Lowering(core_table().bodies)
    kept, lost = (
        lost_in_company(lowering, [_concrete(target, x)]) for target in (aten.neg.default, aten.sigmoid.default)
    )
    assert kept == [None]
    assert "in company" in str(lost)


def test_only_conversions_that_torch_mlir_gets_right_are_offered() -> None:
    choice, x = LoweringChoice(KnownFailures()), torch.empty(2)
    offered = [
        dtype
        for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.int32, torch.uint8, torch.complex64)
        if choice.offers(_call(prims.convert_element_type.default, x, dtype))
    ]
    assert offered == [torch.bfloat16, torch.bool]


def test_a_record_that_says_more_is_found_out() -> None:
    lines = [Line("aten.relu.default", "float32", "direct", "wrong", 8, 7, "1 of 1 values differ, 0.0 not nan | [x]")]
    (told,) = disagreement(core_table().records[aten.relu.default], lines)
    assert "aten.relu.default is not right in float32" in told


def test_the_lines_of_the_verdicts() -> None:
    lines = [
        Line("aten.new.default", "float32", "direct", "right", 8, 8, ""),
        Line("aten.new.default", "float64", "direct", "right", 2, 2, ""),
        Line("aten.new.default", "complex64", "direct", "none", 2, 0, "refused: error"),
        Line("aten.new.default", "bool", "direct", "wrong", 8, 7, "1 of 2 values differ, 0 not 1 | [True]"),
    ]
    assert findings(lines) == [
        "aten.new.default\tright\tfloat32 float64\t\t",
        "aten.new.default\twrong\tbool\t\t0 not 1: [True]",
    ]


@pytest.mark.parametrize(
    ("target", "shapes", "platform", "offered"),
    [
        (aten.mm.default, [(2, 3), (3, 4)], "cpu", True),
        (aten.mm.default, [(0, 3), (3, 4)], "cpu", False),  # empty tensors
        (internal.GROUPED_PRODUCT, [(2, 3), (1, 3, 4), (1,)], "cpu", False),  # no lowering
    ],
)
def test_who_lowers_a_call(target: OpOverload, shapes: list[tuple[int, ...]], platform: str, offered: bool) -> None:
    node = _call(target, *(torch.empty(shape) for shape in shapes))
    assert LoweringChoice(KnownFailures(), platform=platform).offers(node) == offered


@pytest.mark.parametrize(("rows", "offered"), [((5,), True), ((2, 5), False)])
def test_linear_layers_that_keep_their_rows_apart_are_not_merged_by_torch_mlir(
    rows: tuple[int, ...], offered: bool
) -> None:
    node = _call(internal.LINEAR, torch.empty(*rows, 3), torch.empty(4, 3))
    assert LoweringChoice(KnownFailures(), platform="tpu").offers(node) == offered
    narrow = _call(internal.LINEAR, torch.empty(*rows, 3).bfloat16(), torch.empty(4, 3).bfloat16())
    assert not LoweringChoice(KnownFailures(), platform="tpu").offers(narrow)


@pytest.mark.parametrize(("platform", "offered"), [("cpu", False), ("tpu", True)])
def test_speed_on_one_platform_does_not_bind_another(platform: str, offered: bool) -> None:
    x, kernel = torch.empty(1, 8, 8, 4), torch.empty(3, 3, 1, 4)
    node = _call(internal.CONVOLUTION, x, kernel, None, [1, 1], [1, 1], [1, 1], 4)
    assert LoweringChoice(KnownFailures(), platform=platform).offers(node) == offered


def test_an_operand_twice_is_two_operands() -> None:
    """torch-mlir would fold some ops of x and x as if NaN and infinity were not."""
    x = torch.empty(2, 2)
    graph = single_call_graph(_call(aten.mul.Tensor, x, x), None)
    assert [node.op for node in graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]


def test_a_form_takes_the_place_of_its_op() -> None:
    graph = single_call_graph(_call(aten.split.Tensor, torch.empty(5, 2), 2), core_table().forms[aten.split.Tensor])
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert {node.target for node in made} == {aten.slice.Tensor}
    assert [tuple(node.meta["val"].shape) for node in made] == [(2, 2), (2, 2), (1, 2)]


def test_a_decomposition_takes_the_place_of_its_op() -> None:
    x = torch.empty(3, 4)
    graph = single_call_graph(_call(aten.gelu_backward.default, x, x), core_table().forms[aten.gelu_backward.default])
    assert [node.op for node in graph.nodes][:2] == ["placeholder", "placeholder"]
    made = {node.target for node in graph.nodes if node.op == "call_function"}
    assert made <= core_table().records.keys()
    assert aten.gelu_backward.default not in made


def test_a_decomposition_is_taken_where_it_is_right_and_the_op_itself_is_not() -> None:
    direct = [
        Line("aten.new.default", "float32", "direct", "right", 8, 8, ""),
        Line("aten.new.default", "int64", "direct", "none", 8, 0, "refused: error"),
    ]
    of_int64 = Line("aten.new.default", "int64", "decomposed", "right", 8, 8, "")
    assert findings([*direct, of_int64]) == ["aten.new.default\tright\tfloat32\t\t"]
    both = [*direct, of_int64, Line("aten.new.default", "float32", "decomposed", "right", 8, 8, "")]
    assert findings(both) == ["aten.new.default\tright\tfloat32 int64\t\t"]
    right = Finding(Verdict.RIGHT, frozenset({torch.float32, torch.int64}))
    record = replace(core_table().records[aten.relu.default], torch_mlir=(right,))
    assert "to be offered in the way decomposed, not direct" in disagreement(record, both)[0]
    assert disagreement(replace(record, as_aten=decompose), both) == []


def _concrete(target: OpOverload, *args: object) -> Call:
    leaves, treespec = pytree.tree_flatten((args, {}))
    return Call(target, tuple(leaves), treespec)


def _call(target: OpOverload, *args: object) -> Node:
    mode, graph, known = FakeTensorMode(), Graph(), {}
    for value in args:
        if isinstance(value, torch.Tensor) and id(value) not in known:
            known[id(value)] = graph.placeholder(f"x{len(known)}")
            known[id(value)].meta["val"] = mode.from_tensor(value)
    node = graph.call_function(target, tuple(known.get(id(value), value) for value in args))
    fakes = [known[id(value)].meta["val"] if id(value) in known else value for value in args]
    with mode:
        node.meta["val"] = target(*fakes)
    return node
