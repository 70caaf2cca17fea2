"""Rewrites a symbolic graph to a program at bucket sizes: pad rules insert masks where padding could change a result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from dynaxla.bucketing.argument_roles import check_sizes_allowed, no_rule
from dynaxla.bucketing.pad_rule import PadRules, rule_of
from dynaxla.bucketing.pad_rules.alignment import size_of_dim
from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder, PaddingMask
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, Results, Unpaddable, is_full, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.runtime_scalars import ScalarVector
from dynaxla.bucketing.size_buckets import PartBucket
from dynaxla.bucketing.size_expressions import Size, is_varying
from dynaxla.custom_ops.schema import arguments_of
from dynaxla.diagnostics import ExactShape, user_frame
from dynaxla.fx.permutations import is_dense
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.types import ORIGIN, SOURCE, row_major_strides

aten = torch.ops.aten
Made = TypeVar("Made")
Value = Results | Size
"""The counterpart of a node of the symbolic graph: padded values, or a size."""


@dataclass(frozen=True, slots=True)
class PaddedOutput:
    """How a result of the padded program is cropped.

    Attributes:
        factors: the true sizes of the result's dims.
        sizes: the true shape, to which the cropped result is reshaped.
        strides: eager's strides.
        saved: whether only the backward reads the result, so that it may stay padded.
    """

    factors: tuple[Size, ...]
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    saved: bool


@dataclass(frozen=True, slots=True)
class PaddedGraph:
    """A part's program at one bucket.

    Attributes:
        graph: its placeholders are the part's, row-major and at padded sizes, followed by the vectors of `given`; its outputs
            are the part's.
        symbols: the symbols whose true values the program reads.
        given: the vectors of runtime scalars that the program reads.
        padded: per placeholder its padded shape; None if it is not padded.
        outputs: per output: how to crop it; a size to compute; or None for an output that is not padded.
        masks: where padding is set to a number.
    """

    graph: Graph
    symbols: tuple[sympy.Symbol, ...]
    given: tuple[ScalarVector, ...]
    padded: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[PaddedOutput | Size | None, ...]
    masks: tuple[PaddingMask, ...] = ()


class CannotPad(Exception):
    """A part cannot be padded because one of its nodes is `Unpaddable`.

    Attributes:
        reason: the op that cannot be padded, and why.
        of_bucket: whether this holds for this bucket only.
    """

    def __init__(self, reason: ExactShape, of_bucket: bool = False) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.of_bucket = of_bucket


def pad_graph(
    graph: Graph, buckets: PartBucket, device: torch.device, rules: PadRules, saved: Collection[int] = ()
) -> PaddedGraph:
    """Rewrites a functional symbolic graph to run at bucket sizes, by the pad rules of its ops.

    Args:
        saved: indices of the outputs that only the backward reads.

    Raises:
        CannotPad: an op has no rule for the padding in its arguments.
    """
    return _WholeGraph(graph, PaddedGraphBuilder(buckets, device), rules, saved).run()


class GraphPadder:
    """Pads a graph call by call; who makes one gives its placeholders their padded values.

    Args:
        build: makes the padded graph.
        rules: the pad rules of its ops.
    """

    def __init__(self, graph: Graph, build: PaddedGraphBuilder, rules: PadRules) -> None:
        self._source = graph
        self._rules = rules
        self._build = build
        self._values: dict[Node, Value] = {}

    def _rewrite_calls(self) -> None:
        self._build.number_placeholders()
        for node in self._source.nodes:
            if node.op == "call_function":
                self._build.rewritten = node
                self._build.meta = {ORIGIN: node.name, **{key: node.meta[key] for key in SOURCE if key in node.meta}}
                self._values[node] = self._rewritten(node, self._call)
        self._build.meta = {}

    def _rewritten(self, node: Node, rewrite: Callable[[Node], Made]) -> Made:
        """Rewrites a node. Raises CannotPad, with the node's op and source line, if that fails."""
        try:
            return rewrite(node)
        except CannotPad:  # of a call within a sub-graph
            raise
        except Unpaddable as why:
            reason = ExactShape(str(_op_of(node)), why.detail, user_frame(node))
            raise CannotPad(reason, why.of_bucket) from None
        except Exception as error:  # the border of a call's padding, see partition/error_boundary.py
            detail = f"its pad rule failed: {type(error).__name__}: {error}"
            raise CannotPad(ExactShape(str(node.target), detail, user_frame(node))) from error

    def _call(self, node: Node) -> Value:
        value = node.meta["val"]
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            results, place = self._values[node.args[0]], node.args[1]
            assert isinstance(results, tuple)
            assert isinstance(place, int)
            picked = results[place]
            if picked is None:
                raise Unpaddable("that result is not known on padded values")
            return picked
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return self._build.substitute(value)
        if not isinstance(node.target, OpOverload):
            raise Unpaddable("it has no rule for padded values")
        given = {name: self._value(argument) for name, argument in arguments_of(node).items()}
        rule = rule_of(node.target, self._rules)
        call = RuleContext(node, self._build, given, rule.arguments(node.target))
        if not _meets_padding(call) and self._is_fixed(value):
            return _unpadded(call)
        if rule is not no_rule:
            check_sizes_allowed(call.takes, given)
        made = rule(call)
        self._check_sizes(value, made)
        return made

    def _check_sizes(self, value: object, made: Value) -> None:
        """Raises Unpaddable if the true sizes of a padded result are not the op's: its rule does not fit the call."""
        values, results = (each if isinstance(each, (tuple, list)) else (each,) for each in (value, made))
        for tensor, result in zip(values, results, strict=True):
            if isinstance(tensor, torch.Tensor) and isinstance(result, PaddedValue):
                told, true = [*map(size_of_dim, result.dims)], self._build.known_sizes(tensor)
                if len(told) != len(true) or not all(map(self._may_be_equal, told, true)):
                    raise Unpaddable(f"its pad rule gives the sizes {told}, the op {[*true]}")

    def _may_be_equal(self, one: Size, other: Size) -> bool:
        return one == other or self._build.upper_bound_of(one) == self._build.upper_bound_of(other)

    def _is_fixed(self, value: object) -> bool:
        values = value if isinstance(value, (tuple, list)) else (value,)
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        return all(isinstance(size, int) for v in tensors for size in self._build.known_sizes(v))

    def _value(self, value: object) -> object:
        if isinstance(value, Node):
            return self._values[value]
        if isinstance(value, (list, tuple)):
            return [self._value(v) for v in value]
        return self._build.substitute(value) if isinstance(value, torch.SymInt) else value


def _op_of(node: Node) -> object:
    """What a node calls; of one result of several, the op that gives them."""
    several = node.args[0] if node.target is operator.getitem else None
    return several.target if isinstance(several, Node) else node.target


class _WholeGraph(GraphPadder):
    """Pads the graph of a part.

    Args:
        saved: indices of the outputs that only the backward reads.
    """

    def __init__(self, graph: Graph, build: PaddedGraphBuilder, rules: PadRules, saved: Collection[int]) -> None:
        super().__init__(graph, build, rules)
        self._saved = saved

    def run(self) -> PaddedGraph:
        placeholders = self._source.find_nodes(op="placeholder")
        for node in placeholders:
            self._values[node] = self._rewritten(node, self._placeholder)
        self._rewrite_calls()
        output = self._source.output_node()
        outputs = self._rewritten(output, self._outputs)
        shapes = tuple(self._padded_shape(node) for node in placeholders)
        vectors, masks = self._build.list_scalar_vectors(), tuple(self._build.masks)
        return PaddedGraph(self._build.graph, self._build.bucket.read, vectors, shapes, outputs, masks)

    def _placeholder(self, node: Node) -> Value:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            known = self._build.substitute(value)
            if is_varying(known) and not known.free_symbols <= set(self._build.bucket.read):
                raise Unpaddable("it is a number that varies and no size")
            self._build.placeholder(node.name, 0)  # the program reads its symbols instead
            return known
        dims = self._build.true_dims(value)
        sizes = [d[0].padded for d in dims]
        known_strides = [self._build.substitute(stride) for stride in value.stride()]
        strides: Sequence[int] = [stride for stride in known_strides if isinstance(stride, int)]
        if len(strides) < len(known_strides) or not all(map(is_full, dims)):
            strides = self._padded_strides(sizes, known_strides)
        fake = self._build.fake(sizes, strides, value)
        return PaddedValue(self._build.placeholder(node.name, fake), dims)

    def _padded_strides(self, sizes: Sequence[int], strides: Sequence[Size]) -> Sequence[int]:
        """Dense strides of a padded tensor, with the true tensor's order of dims in memory.

        They are row-major if that order is unknown because a dim is expanded or a stride has no bound. The true tensor then has
        gaps and is copied in any case.
        """
        bounds = [self._build.upper_bound_of(stride) or 0 for stride in strides]
        order = sorted(range(len(sizes)), key=lambda d: (-bounds[d], d)) if all(bounds) else range(len(sizes))
        dense = row_major_strides([sizes[d] for d in order])
        return [dense[order.index(d)] for d in range(len(sizes))]

    def _padded_shape(self, node: Node) -> tuple[int, ...] | None:
        value = self._values[node]
        if not isinstance(value, PaddedValue) or value.is_full:
            return None
        return tuple(value.meta.shape)

    def _outputs(self, node: Node) -> tuple[PaddedOutput | Size | None, ...]:
        returned = node.args[0]
        items = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        nodes, outputs = [], []
        owners = {v.node: n for n, v in self._values.items() if n.op == "placeholder" and isinstance(v, PaddedValue)}
        for place, item in enumerate(items):
            made, output = self._output(item, place in self._saved)
            if isinstance(item, Node) and isinstance(made, Node) and owners.setdefault(made, item) is not item:
                made = self._build.emit(aten.clone.default, made)  # on padded values one node may stand for two
            nodes.append(made)
            outputs.append(output)
        self._build.graph.output(tuple(nodes))
        return tuple(outputs)

    def _output(self, item: Argument, is_saved: bool) -> tuple[Argument, PaddedOutput | Size | None]:
        if not isinstance(item, Node):
            return item, None
        value = self._values[item]
        if not isinstance(value, PaddedValue):
            assert not isinstance(value, tuple), "results are returned one by one"
            return (None, value) if is_varying(value) else (value, None)
        original = item.meta["val"]
        strides = tuple(self._build.substitute(stride) for stride in original.stride())
        if item.op == "placeholder" or (value.is_full and value.meta.stride() == strides and is_dense(value.meta)):
            return value.node, None
        made, dims = value.node, list(value.dims)
        for place, stride in enumerate(strides):
            if stride == 0 and padded_size(dims[place]) > 1:  # an expanded dim: eager has one element of it in memory
                made, dims[place] = self._build.emit(aten.slice.Tensor, made, place, 0, 1), (Factor(1, 1),)
        factors: list[Factor] = [factor for dim in dims for factor in _never_empty(dim)]
        if len(factors) != len(dims):
            made = self._build.emit(aten.view.default, made, [f.padded for f in factors])
        elif is_saved:  # the backward reads it in the order that eager has
            sizes = [factor.padded for factor in factors]
            made = self._build.restride(made, self._padded_strides(sizes, strides))
        real = [factor.size for factor in factors]
        return made, PaddedOutput(tuple(real), self._build.known_sizes(original), strides, is_saved)


def _never_empty(dim: Dim) -> Dim:
    return dim or (Factor(1, 1),)


def _meets_padding(call: RuleContext) -> bool:
    """Whether an argument is padded or a symbolic size."""
    values = [v for value in call.given.values() for v in (value if isinstance(value, list) else [value])]
    return any(not v.is_full if isinstance(v, PaddedValue) else is_varying(v) for v in values)


def _unpadded(call: RuleContext) -> Results:
    """Emits a call that has no padded argument and no symbolic size, as it is."""
    node = call.same()
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return PaddedValue(node, tuple((Factor(int(s), int(s)),) for s in value.shape))
    picks = [call.build.emit(operator.getitem, node, i) for i in range(len(value))]
    return tuple(
        PaddedValue(pick, tuple((Factor(int(s), int(s)),) for s in v.shape)) if isinstance(v, torch.Tensor) else None
        for pick, v in zip(picks, value, strict=True)
    )
