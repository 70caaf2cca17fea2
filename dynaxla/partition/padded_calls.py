"""The pad rule of control flow: its sub-graphs are padded by the rules of their ops, and become a form of its operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.bucketing.argument_roles import TRUE_SIZE, PadRule, takes
from dynaxla.bucketing.pad_rule import PadRules
from dynaxla.bucketing.pad_rules.contiguous import move_to_front
from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.bucketing.padded_subgraph import Operand, PaddedSubgraph, SubgraphPadder
from dynaxla.bucketing.padded_value import Dim, PaddedValue, Results, Unpaddable, is_full, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.runtime_scalars import ScalarVector
from dynaxla.bucketing.size_expressions import is_varying
from dynaxla.fx.graph_utils import submodule
from dynaxla.partition.subgraph_calls import Region, RegionForms
from dynaxla.torch_api.overloads import HigherOrderOperator
from dynaxla.types import SUBGRAPHS, row_major_strides

aten = torch.ops.aten
_higher_order = torch.ops.higher_order

Pad: TypeAlias = Callable[[GraphModule, Sequence[Operand]], SubgraphPadder]
Padded: TypeAlias = tuple[list[Any], list[PaddedSubgraph], list[tuple[Dim, ...]], Dim | None]
"""Of a call its arguments, of which sub-graphs are still to be replaced; the padded sub-graphs, in order; the dims of its
results; and of a loop over places their dim."""


def is_padded(region: Region) -> bool:
    """Whether there is a rule for the operator of a region."""
    return region.target in _PADDED


def pad_sub_graphs(forms: RegionForms, rules: PadRules) -> PadRule:
    """The pad rule of a region.

    Args:
        forms: of the region; the rule adds one.
        rules: the pad rules of the ops in its sub-graphs.
    """

    @takes(sizes=TRUE_SIZE)
    def pad_region(call: RuleContext) -> Results:
        """Each sub-graph is padded by the rules of its ops; a loop over places ends behind the last real one."""
        region = forms.captured
        args = region.arguments(call["tensors"], call["sizes"])
        padded_args, dims, places = _RegionPadder(rules).pad(call, region.target, args)
        padded, tensors, _ = Region.of(region.target, padded_args, _as_graph)
        node = call.same(tensors=tensors, sizes=[], places=places, form=forms.add(padded))
        node.meta[SUBGRAPHS] = padded.graphs
        return call.results(node, dims)

    return pad_region


class _RegionPadder:
    """Pads calls with sub-graphs by the rules of the ops in these."""

    def __init__(self, rules: PadRules) -> None:
        self._rules = rules

    def pad(
        self, call: RuleContext, target: HigherOrderOperator, given: Sequence[Any]
    ) -> tuple[list[Any], list[tuple[Dim, ...]], Node | None]:
        """Returns the arguments of the padded call, the dims of its results, and how many places a loop over padded ones has.

        Args:
            given: the arguments of the call, with padded values, sizes and sub-graphs.
        """

        def pad(module: GraphModule, operands: Sequence[Operand]) -> SubgraphPadder:
            return SubgraphPadder(module, operands, call.build, self._rules, self._pad_nested)

        args, graphs, dims, places = _PADDED[target](call, pad, *given)
        vectors = [_emit_vector(call.build, vector) for graph in graphs for vector in graph.vectors]
        modules = iter(_unify_placeholders(graphs))
        made = [next(modules) if isinstance(x, GraphModule) else _unwrapped(x) for x in args]
        made[-1] = [*made[-1], *vectors]  # type: ignore[misc]
        is_partial = places is not None and not is_full(places)
        count = call.build.scalar(single_factor(places).size) if is_partial else None  # type: ignore[arg-type]
        return made, dims, count

    def _pad_nested(self, call: RuleContext, owner: GraphModule) -> tuple[list[Any], list[tuple[Dim, ...]]]:
        target = call.node.target
        if target not in _PADDED:
            raise Unpaddable("it has no rule for padded values")
        given = [submodule(owner, each) or each for each in call["args"]]
        args, dims, places = self.pad(call, target, given)  # type: ignore[arg-type]
        return (args if places is None else [*args, places]), dims


def _as_graph(value: object) -> GraphModule | None:
    return value if isinstance(value, GraphModule) else None


def _pad_cond(
    call: RuleContext, pad: Pad, pred: Operand, true: GraphModule, false: GraphModule, operands: Sequence[Operand]
) -> Padded:
    dims = [call.build.true_dims(value) for value in call.node.meta["val"]]
    graphs = [pad(branch, operands).finish(dims) for branch in (true, false)]
    return [pred, true, false, operands], graphs, dims, None


def _pad_while_loop(
    call: RuleContext,
    pad: Pad,
    cond: GraphModule,
    body: GraphModule,
    carried: Sequence[PaddedValue],
    more: Sequence[Operand],
) -> Padded:
    carried, dims = _carry(call, carried)
    condition, step = (pad(graph, [*carried, *more]) for graph in (cond, body))
    graphs = [condition.finish(condition.find_true_dims()), step.finish(dims)]
    return [cond, body, carried, more], graphs, dims, None


def _pad_scan(
    call: RuleContext,
    pad: Pad,
    combine: GraphModule,
    init: Sequence[PaddedValue],
    xs: Sequence[PaddedValue],
    more: Sequence[Operand],
) -> Padded:
    init, carried = _carry(call, init)
    xs = [move_to_front(call, x, 0) for x in xs]
    places = xs[0].dims[0]
    padder = pad(combine, [*init, *(_slice_of(call, x) for x in xs), *more])
    of_places = padder.find_true_dims()[len(init) :]
    graph = padder.finish([*carried, *of_places])
    return [combine, init, xs, more], [graph], [*carried, *((places, *dims) for dims in of_places)], places


def _pad_map(
    call: RuleContext, pad: Pad, body: GraphModule, xs: Sequence[PaddedValue], more: Sequence[Operand]
) -> Padded:
    args, graphs, dims, places = _pad_scan(call, pad, body, (), xs, more)
    return [body, *args[2:]], graphs, dims, places


_PADDED: Mapping[HigherOrderOperator, Callable[..., Padded]] = MappingProxyType(
    {
        _higher_order.cond: _pad_cond,
        _higher_order.while_loop: _pad_while_loop,
        _higher_order.scan: _pad_scan,
        _higher_order.map_impl: _pad_map,
    }
)


def _carry(call: RuleContext, values: Sequence[PaddedValue]) -> tuple[list[PaddedValue], list[tuple[Dim, ...]]]:
    """The values that a loop begins with, real elements in front, and their dims. What padding holds later is unknown."""
    moved = []
    for value in values:
        for place in range(len(value.dims)):
            value = move_to_front(call, value, place)
        moved.append(replace(value, fill=None))
    return moved, [value.dims for value in moved]


def _slice_of(call: RuleContext, value: PaddedValue) -> PaddedValue:
    """What a loop over the first dim reads at one place. Its node is in no graph."""
    shape = value.meta.shape[1:]
    node = Graph().placeholder("slice")
    node.meta = {"val": call.build.fake(shape, row_major_strides(shape), value.meta)}
    return PaddedValue(node, value.dims[1:], value.fill)


def _unwrapped(value: Any) -> Any:
    """An argument of the padded call. A sub-graph reads sizes that vary from its vectors."""
    if isinstance(value, (tuple, list)):
        return [_unwrapped(each) for each in value]
    if isinstance(value, PaddedValue):
        return value.node
    return 0 if is_varying(value) else value


def _emit_vector(build: PaddedGraphBuilder, vector: ScalarVector) -> Node:
    numbers = [build.scalar(number) for number in vector.numbers]
    return build.emit(aten.stack.default, numbers)


def _unify_placeholders(graphs: Sequence[PaddedSubgraph]) -> list[GraphModule]:
    """Gives each graph placeholders for the vectors of all: the sub-graphs of a call have the same operands."""
    counts = [len(graph.vectors) for graph in graphs]
    for number, padded in enumerate(graphs):
        graph = padded.module.graph
        own = graph.find_nodes(op="placeholder")[-counts[number] :] if counts[number] else []
        body = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(own[0] if own else body):
            for place in range(sum(counts[:number])):
                graph.placeholder(f"unread_{place}")
        with graph.inserting_before(body):
            for place in range(sum(counts[number + 1 :])):
                graph.placeholder(f"unread_behind_{place}")
        padded.module.recompile()
    return [padded.module for padded in graphs]
