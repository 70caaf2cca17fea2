"""Turns control flow into operators: a higher-order call becomes an operator with a JAX body, like a custom kernel.

An operator defined here belongs to one compiled graph and is released with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dynaxla.custom_ops.reversed_scan import REVERSED_SCAN
from dynaxla.diagnostics import FallbackReason
from dynaxla.errors import LinkError
from dynaxla.fx.aliased_ops import replace_aliased_ops
from dynaxla.fx.graph_utils import attribute, submodule, tensors_of
from dynaxla.lowering import control_flow
from dynaxla.ops.record import Body, Record
from dynaxla.ops.table import OpTable
from dynaxla.partition.inline_subgraphs import INVOKE, has_symbols, inline_call, replace_picks, results_of
from dynaxla.partition.layer_scan import scan_layers
from dynaxla.partition.op_support import is_size_arithmetic, make_region_reason, refusal
from dynaxla.partition.padded_calls import is_padded, pad_sub_graphs
from dynaxla.partition.subgraph_calls import Operand, Region, RegionForms
from dynaxla.torch_api.fakes import FakeTensor, is_erased, mode_of
from dynaxla.torch_api.overloads import REGIONS, OpOverload
from dynaxla.types import SUBGRAPHS

_LARGEST_CONSTANT = 1024  # elements
_higher_order = torch.ops.higher_order
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Body:
    """The JAX body of a region.

    Attributes:
        name: name of the operator.
        forms: the region that it computes, and its padded forms.
        bodies: JAX bodies of the ops in the region.
        library: library that defines the operator; the definition ends with the last reference to the library.
    """

    name: str
    forms: RegionForms
    bodies: Mapping[OpOverload, Body]
    library: torch.library.Library

    def __call__(
        self,
        tensors: Sequence[control_flow.Value],
        sizes: Sequence[int],
        places: control_flow.Value | None = None,
        form: str = "",
    ) -> control_flow.Values:
        region = self.forms[form]
        args = region.arguments(tensors, sizes)
        try:
            return control_flow.call(region.target, args if places is None else (*args, places), self.bodies)
        except (TypeError, ValueError) as error:  # for example if branches return values of different shapes
            raise LinkError(f"JAX cannot trace the {region.target}: {error}", op=self.name) from error


@dataclass(frozen=True, slots=True)
class RegionReplacements:
    """The result of `replace_regions`.

    Attributes:
        table: the op table, with records of the new operators.
        left: reasons of the calls that run in eager, by node name.
    """

    table: OpTable
    left: Mapping[str, FallbackReason]


def replace_regions(
    module: GraphModule,
    weights: Collection[Node],
    table: OpTable,
    device: torch.device,
    numbers: Iterator[int],
    rewrite: Callable[[GraphModule], None],
) -> RegionReplacements:
    """Replaces every supported higher-order call with an operator, in place.

    A sub-graph call (`nested_compile_region`) with a symbolic size, or with an op that cannot be compiled, is inlined
    instead: in the graph every op has its pad rule, and only the unsupported ops run in eager.

    Args:
        module: a functional graph.
        weights: its placeholders whose stacked copies may be cached, so that calls for successive layers become a loop.
        table: records of the sub-graphs' ops.
        device: the device of the graph.
        numbers: numbers for the operators' names.
        rewrite: rewrites every sub-graph that becomes part of an operator, in place.
    """
    return _Taker(table, device, numbers, rewrite).take(module, weights)


class _Taker:
    def __init__(
        self,
        table: OpTable,
        device: torch.device,
        numbers: Iterator[int],
        rewrite: Callable[[GraphModule], None],
    ) -> None:
        self._rewrite = rewrite
        self._table = table
        self._device = device
        self._numbers = numbers
        self._library = torch.library.Library(REGIONS, "FRAGMENT")
        self._operators: dict[object, Record] = {}

    def take(self, module: GraphModule, weights: Collection[Node]) -> RegionReplacements:
        left: dict[str, FallbackReason] = {}
        symbolic = has_symbols(module.graph)
        for each in module.modules():
            if symbolic and isinstance(each, GraphModule):
                _make_conditions_tensors(each)
        if not symbolic:

            def takes(node: Node) -> bool:
                return not self._refused(_region(module, node)[0], node)

            if weights:
                scan_layers(module, weights, takes)
            _reverse_scans(module, takes)
        while node := _next_call(module, left):
            region, tensors, sizes = _region(module, node)
            refused = self._refused(region, node)
            if node.target is INVOKE and (refused or symbolic) and inline_call(module, node):
                continue
            if refused:
                left[node.name] = make_region_reason(node, refused)
                continue
            if region.key not in self._operators:
                self._operators[region.key] = self._define(region)
            _replace(module, node, region, self._operators[region.key].target, tensors, sizes)
        return RegionReplacements(self._table.with_records(self._operators.values()), left)

    def _define(self, region: Region) -> Record:
        for graph in region.graphs:
            self._rewrite(graph)
        name, digest = f"{region.target}_{next(self._numbers)}", self._digest(region)
        full, forms = f"{name}.{digest}".removesuffix("."), RegionForms(region)
        # `places`: of the places of a loop over padded ones, how many are real, and come first
        self._library.define(f"{full}(Tensor[] tensors, SymInt[] sizes, Tensor? places=None, str form='') -> Tensor[]")
        self._library.impl(full, forms.run_eager, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{REGIONS}::{full}", forms.run_fake, lib=self._library)
        target = getattr(getattr(getattr(torch.ops, REGIONS), name), digest or "default")
        body = _Body(str(target), forms, self._table.bodies, self._library)
        return Record(target, body, pad_sub_graphs(forms, self._table.pads) if is_padded(region) else None)

    def _digest(self, region: Region) -> str:
        """Digest of a region's computation; empty if it cannot be computed, or if the region uses operators of the user."""
        called = (each for graph in region.graphs for each in graph.modules() if isinstance(each, GraphModule))
        return "" if any(self._table.find_user_op(each.graph) for each in called) else region.digest

    def _refused(self, region: Region, node: Node) -> str:
        """Returns why a call cannot be compiled; empty if it can."""
        if not all(isinstance(x, Tensor) for x in node.meta["val"]):
            return "one of its results is no tensor"
        if region.target is _higher_order.cond and region.leaves[0] != Operand(True):
            return "its condition is no tensor"
        if region.target is _higher_order.while_loop and not _carries_tensors(node):
            return "one of its carried values is no tensor"
        return next((why for graph in region.graphs if (why := self._refused_graph(graph))), "")

    def _refused_graph(self, module: GraphModule) -> str:
        replace_aliased_ops(module.graph)
        module.recompile()
        for node in module.graph.nodes:
            if node.op == "get_attr" and not _is_embeddable(module, node):
                return "its sub-graph holds a large tensor"
            if node.op == "call_function" and (why := self._refused_node(module, node)):
                return why
        return ""

    def _refused_node(self, module: GraphModule, node: Node) -> str:
        if node.target in control_flow.TARGETS:
            return self._refused(_region(module, node)[0], node)
        if is_size_arithmetic(node):
            is_supported = node.target in control_flow.PLAIN or not isinstance(node.target, OpOverload)
            return "" if is_supported else f"{node.target} in its sub-graph needs information that only torch has"
        reason = refusal(node, self._table.records, self._device)
        if reason is not None:
            return f"{reason.op} in its sub-graph: {reason.id.value}{'; ' + reason.detail if reason.detail else ''}"
        return "" if node.target in self._table.bodies else f"{node.target} in its sub-graph has no lowering"


def _next_call(module: GraphModule, left: Collection[str]) -> Node | None:
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in control_flow.TARGETS and node.name not in left:
            return node  # type: ignore[no-any-return]
    return None


def _make_conditions_tensors(module: GraphModule) -> None:
    """Makes the conditions of branches that sizes decide, truths that no guard fixes, tensors."""
    for node in module.graph.find_nodes(op="call_function", target=_higher_order.cond):
        condition, results = node.args[0], tensors_of(node)
        if results and isinstance(condition, Node) and isinstance(condition.meta["val"], torch.SymBool):
            with module.graph.inserting_before(node), mode_of(results[0]):
                made = module.graph.call_function(aten.scalar_tensor.default, (condition,), {"dtype": torch.bool})
                made.meta = {**node.meta, "val": torch.empty((), dtype=torch.bool)}
            node.args = (made, *node.args[1:])
            module.recompile()


def _reverse_scans(module: GraphModule, takes: Callable[[Node], bool]) -> None:
    """Scans from the last place on where all that is scanned is flipped, and all results of places are, as in a backward of
    torch's."""
    for node in module.graph.find_nodes(op="call_function", target=_higher_order.scan):
        combine, init, xs, more = node.args
        stacked = [pick for pick in node.users if pick.args[1] >= len(init)]  # type: ignore[operator]
        flips = [flip for pick in stacked for flip in pick.users]
        if not xs or not all(map(_flips_places, (*xs, *flips))) or not takes(node):
            continue
        node.target, node.args = REVERSED_SCAN, (combine, init, [x.args[0] for x in xs], more)
        for flip in flips:
            flip.replace_all_uses_with(flip.args[0])  # type: ignore[arg-type]
            module.graph.erase_node(flip)


def _flips_places(node: Node) -> bool:
    return node.target is aten.flip.default and list(node.args[1]) == [0]  # type: ignore[arg-type]


def _region(module: GraphModule, node: Node) -> tuple[Region, list[Node], list[Node]]:
    """Returns a call as a region, with the tensors and sizes of the call."""
    return Region.of(node.target, node.args, partial(submodule, module))  # type: ignore[arg-type]


def _replace(
    module: GraphModule, node: Node, region: Region, target: OpOverload, tensors: list[Node], sizes: list[Node]
) -> None:
    with module.graph.inserting_before(node):
        made = module.graph.call_function(target, (tensors, sizes))
    made.meta = {**node.meta, "val": list(node.meta["val"]), SUBGRAPHS: region.graphs}
    if node.target is INVOKE:  # results that are operands, such as weights saved for the backward, are read directly
        called = submodule(module, node.args[0])
        assert called is not None
        operands = dict(zip((n for n in called.graph.nodes if n.op == "placeholder"), node.args[2:], strict=True))
        returned = results_of(called.graph)
        replace_picks(module.graph, node, [operands.get(x) for x in returned])  # type: ignore[call-overload, misc]
    node.replace_all_uses_with(made)
    if not is_erased(node):
        module.graph.erase_node(node)


def _is_embeddable(module: GraphModule, node: Node) -> bool:
    """Whether an attribute is a sub-graph, or a tensor small enough to be a constant of the program."""
    if submodule(module, node) is not None:
        return True
    value = attribute(module, node)
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.numel() <= _LARGEST_CONSTANT


def _carries_tensors(node: Node) -> bool:
    carried = node.args[2]
    assert isinstance(carried, (tuple, list))
    return all(isinstance(x, Node) and isinstance(x.meta.get("val"), Tensor) for x in carried)
