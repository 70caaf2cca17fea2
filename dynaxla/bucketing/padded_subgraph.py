"""Pads a sub-graph of a call, a branch or the body of a loop: its operands are padded values of the graph around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from dynaxla.bucketing.pad_rule import PadRules
from dynaxla.bucketing.pad_rules.alignment import move_elements, size_of_dim
from dynaxla.bucketing.padded_graph import GraphPadder
from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, Unpaddable, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.runtime_scalars import ScalarVector
from dynaxla.bucketing.size_expressions import Size, is_varying
from dynaxla.fx.graph_utils import attribute
from dynaxla.torch_api.modules import graph_module
from dynaxla.torch_api.overloads import HigherOrderOperator
from dynaxla.types import row_major_strides

Operand = PaddedValue | Size


@dataclass(frozen=True, slots=True)
class PaddedSubgraph:
    """A sub-graph at one bucket.

    Attributes:
        module: its placeholders are those of the sub-graph, followed by one for each of `vectors`.
        vectors: the numbers made of true sizes that it reads.
    """

    module: GraphModule
    vectors: tuple[ScalarVector, ...]


PadNested = Callable[[RuleContext, GraphModule], tuple[list[Any], list[tuple[Dim, ...]]]]
"""Pads a call within a sub-graph that has sub-graphs itself. Returns its arguments, with its padded sub-graphs, and the dims
of its results; raises Unpaddable."""


class SubgraphPadder(GraphPadder):
    """Pads a sub-graph.

    Args:
        module: the sub-graph.
        operands: of each placeholder the padded value, of which the node is not read, or the size.
        around: makes the graph around it.
        rules: the pad rules of its ops.
        pad_nested: pads the calls in it that have sub-graphs.

    Raises:
        CannotPad: an op has no rule for the padding in its arguments.
    """

    def __init__(
        self,
        module: GraphModule,
        operands: Sequence[Operand],
        around: PaddedGraphBuilder,
        rules: PadRules,
        pad_nested: PadNested,
    ) -> None:
        super().__init__(module.graph, PaddedGraphBuilder(around.bucket, around.device, around.mode), rules)
        self._module = module
        self._pad_nested = pad_nested
        self._held: dict[str, Any] = {}
        for node, operand in zip(module.graph.find_nodes(op="placeholder"), operands, strict=True):
            self._values[node] = self._placeholder(node, operand)
        for node in module.graph.find_nodes(op="get_attr"):
            if isinstance(attribute(module, node), Tensor):
                self._values[node] = self._constant(node, attribute(module, node))
        self._rewrite_calls()
        around.masks.extend(self._build.masks)

    def _list_results(self) -> list[PaddedValue]:
        """The padded values of its results."""
        returned = self._source.output_node().args[0]
        items = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        values = [self._values[item] if isinstance(item, Node) else None for item in items]
        found = [value for value in values if isinstance(value, PaddedValue)]
        if len(found) < len(items):
            raise Unpaddable("a result of its sub-graph is no tensor")
        return found

    def find_true_dims(self) -> list[tuple[Dim, ...]]:
        """Of each result the dims of one factor each."""
        returned = self._source.output_node().args[0]
        items = returned if isinstance(returned, (tuple, list)) else [returned]
        return [self._build.true_dims(item.meta["val"]) for item in items]  # type: ignore[union-attr]

    def finish(self, dims: Sequence[tuple[Dim, ...]]) -> PaddedSubgraph:
        """Completes the graph: its results have these dims.

        Raises:
            Unpaddable: a result has other true sizes, or is no tensor.
        """
        values = self._list_results()
        made = [self._arrange(value, wanted) for value, wanted in zip(values, dims, strict=True)]
        self._build.graph.output(tuple(made))
        vectors = self._build.list_scalar_vectors()
        return PaddedSubgraph(graph_module(self._held, self._build.graph), vectors)

    def _arrange(self, value: PaddedValue, dims: tuple[Dim, ...]) -> Node:
        call = RuleContext(value.node, self._build, {}, {})
        if len(value.dims) != len(dims):
            raise Unpaddable("its sub-graphs give results of different ranks")
        for place, dim in enumerate(dims):
            if size_of_dim(value.dims[place]) != size_of_dim(dim):
                raise Unpaddable("its sub-graphs give results of different sizes")
            value = move_elements(call, value, place, dim)
        return value.node

    def _placeholder(self, node: Node, operand: Operand) -> PaddedValue | Size:
        if not isinstance(operand, PaddedValue):
            self._build.placeholder(node.name, 0 if is_varying(operand) else int(operand))
            return operand
        return replace(operand, node=self._build.placeholder(node.name, operand.meta))

    def _constant(self, node: Node, value: Tensor) -> PaddedValue:
        made = self._hold(value)
        made.meta = {"val": self._build.fake(value.shape, value.stride(), value)}
        return PaddedValue(made, tuple((Factor(size, size),) for size in value.shape))

    def _hold(self, value: Tensor | GraphModule) -> Node:
        """Reads a tensor or a graph that becomes an attribute of the padded graph."""
        name = f"held_{len(self._held)}"
        self._held[name] = value
        return self._build.graph.get_attr(name)

    def _call(self, node: Node) -> Any:
        if not isinstance(node.target, HigherOrderOperator):
            return super()._call(node)
        call = RuleContext(node, self._build, {"args": [self._argument(each) for each in node.args]}, {})
        args, dims = self._pad_nested(call, self._module)
        held = [self._hold(each) if isinstance(each, GraphModule) else each for each in args]
        made = self._build.graph.call_function(node.target, tuple(held))
        results = zip(dims, node.meta["val"], strict=True)
        shapes = [(tuple(map(padded_size, each)), value) for each, value in results]
        made.meta = {**self._build.meta, "val": [self._build.fake(s, row_major_strides(s), x) for s, x in shapes]}
        return call.results(made, dims)

    def _argument(self, value: Any) -> Any:
        """An argument with its padded values; sub-graphs stay the nodes that read them."""
        if isinstance(value, (list, tuple)):
            return [self._argument(each) for each in value]
        return value if isinstance(value, Node) and value not in self._values else self._value(value)
