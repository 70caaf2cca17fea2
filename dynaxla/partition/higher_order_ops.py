"""Turns control flow into operators: a higher-order call becomes an operator with a JAX body, like a custom kernel.

An operator defined here belongs to one compiled graph and is released with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.types import IntLikeType

from dynaxla.bucketing.pad_rules.recurrent import loop_over_places
from dynaxla.cache.key import Key
from dynaxla.diagnostics import FallbackReason
from dynaxla.errors import LinkError
from dynaxla.fx.aliased_ops import replace_aliased_ops
from dynaxla.fx.graph_utils import attribute, submodule
from dynaxla.lowering import control_flow
from dynaxla.ops.record import Body, Record
from dynaxla.ops.table import OpTable
from dynaxla.partition.inline_subgraphs import INVOKE, has_symbols, inline_call, replace_picks, results_of
from dynaxla.partition.layer_scan import scan_layers
from dynaxla.partition.op_support import is_size_arithmetic, make_region_reason, refusal
from dynaxla.programs.structural_hash import CannotList, graph_listing
from dynaxla.torch_api.fakes import FakeTensor, is_erased
from dynaxla.torch_api.overloads import REGIONS, HigherOrderOperator, OpOverload
from dynaxla.torch_api.pytree import TreeSpec, tree_flatten, tree_unflatten
from dynaxla.types import SUBGRAPHS

_LARGEST_CONSTANT = 1024  # elements
_higher_order = torch.ops.higher_order


@dataclass(frozen=True, slots=True)
class _Operand:
    """Placeholder for the next tensor, or the next size, of a call."""

    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A higher-order operator and its sub-graphs, as a function of tensors and sizes.

    Attributes:
        target: the operator.
        leaves: its flattened arguments; an `_Operand` stands for each tensor and each size.
        tree: the tree spec that unflattens `leaves`.
    """

    target: HigherOrderOperator
    leaves: tuple[object, ...]
    tree: TreeSpec

    @property
    def key(self) -> object:
        """Hashable key, equal for calls of the same sub-graphs."""
        return self.target, tuple(id(x) if isinstance(x, GraphModule) else repr(x) for x in self.leaves), str(self.tree)

    @property
    def graphs(self) -> list[GraphModule]:
        """Returns the sub-graphs."""
        return [x for x in self.leaves if isinstance(x, GraphModule)]

    def arguments(self, tensors: Sequence[object], sizes: Sequence[object]) -> tuple[Any, ...]:
        """Returns the operator's arguments for these tensors and sizes."""
        left, plain = iter(tensors), iter(sizes)
        leaves = [(next(left) if x.is_tensor else next(plain)) if isinstance(x, _Operand) else x for x in self.leaves]
        args: tuple[Any, ...] = tree_unflatten(leaves, self.tree)
        return args

    @property
    def carried(self) -> int:
        """How many results a loop over places carries from place to place; the others have a value of each place."""
        return len(self.arguments(*self._numbers())[1]) if self.target is _higher_order.scan else 0

    @property
    def scanned(self) -> range:
        """Which tensors a loop over places reads one place at a time; none of another operator's."""
        if self.target not in (_higher_order.scan, _higher_order.map_impl):
            return range(0)
        read = self.arguments(*self._numbers())[-2]
        return range(read[0], read[-1] + 1)

    def _numbers(self) -> tuple[range, range]:
        operands = [x for x in self.leaves if isinstance(x, _Operand)]
        tensors = sum(x.is_tensor for x in operands)
        return range(tensors), range(len(operands) - tensors)

    def run_eager(self, tensors: Sequence[Tensor], sizes: Sequence[int], places: Tensor | None = None) -> list[Tensor]:
        if places is None:
            return list(self.target(*self.arguments(tensors, sizes)))
        most, count = tensors[self.scanned[0]].shape[0], int(places)
        read = [x[:count] if index in self.scanned else x for index, x in enumerate(tensors)]
        results = self.run_eager(read, sizes)
        padding = (x.new_zeros(most - count, *x.shape[1:]) for x in results[self.carried :])
        return [*results[: self.carried], *map(torch.cat, zip(results[self.carried :], padding, strict=True))]

    def run_fake(self, tensors: Sequence[Tensor], sizes: Sequence[int], places: Tensor | None = None) -> list[Tensor]:
        """Returns fake results for fake tensors."""
        return [torch.empty_like(x) for x in _FAKE_KERNELS[self.target](*self.arguments(tensors, sizes))]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Body:
    """The JAX body of a region.

    Attributes:
        name: name of the operator.
        region: the region that it computes.
        bodies: JAX bodies of the ops in the region.
        library: library that defines the operator; the definition ends with the last reference to the library.
    """

    name: str
    region: Region
    bodies: Mapping[OpOverload, Body]
    library: torch.library.Library

    def __call__(
        self, tensors: Sequence[control_flow.Value], sizes: Sequence[int], places: control_flow.Value | None = None
    ) -> control_flow.Values:
        args = self.region.arguments(tensors, sizes)
        try:
            return control_flow.call(self.region.target, args if places is None else (*args, places), self.bodies)
        except (TypeError, ValueError) as error:  # for example if branches return values of different shapes
            raise LinkError(f"JAX cannot trace the {self.region.target}: {error}", op=self.name) from error


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
        if weights and not symbolic:
            scan_layers(module, weights, lambda node: not self._refused(_region(module, node)[0], node))
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
        full = f"{name}.{digest}".removesuffix(".")
        # `places`: of the places of a loop over padded ones, how many are real, and come first
        self._library.define(f"{full}(Tensor[] tensors, SymInt[] sizes, Tensor? places=None) -> Tensor[]")
        self._library.impl(full, region.run_eager, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{REGIONS}::{full}", region.run_fake, lib=self._library)
        target = getattr(getattr(getattr(torch.ops, REGIONS), name), digest or "default")
        pad = loop_over_places(region.scanned, region.carried) if region.scanned else None
        return Record(target, _Body(str(target), region, self._table.bodies, self._library), pad)

    def _digest(self, region: Region) -> str:
        """Digest of a region's computation; empty if it cannot be computed, or if the region uses operators of the user."""
        called = (each for graph in region.graphs for each in graph.modules() if isinstance(each, GraphModule))
        if any(self._table.find_user_op(each.graph) for each in called):
            return ""
        try:
            leaves = [graph_listing(x.graph) if isinstance(x, GraphModule) else x for x in region.leaves]
            return f"of_{Key.of(call=region.target.name(), leaves=leaves, tree=str(region.tree)).digest[:32]}"
        except (CannotList, TypeError):
            return ""

    def _refused(self, region: Region, node: Node) -> str:
        """Returns why a call cannot be compiled; empty if it can."""
        if not all(isinstance(x, Tensor) for x in node.meta["val"]):
            return "one of its results is no tensor"
        if region.target is _higher_order.cond and region.leaves[0] != _Operand(True):
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


def _region(module: GraphModule, node: Node) -> tuple[Region, list[Node], list[Node]]:
    """Returns a call as a region, with the tensors and sizes of the call."""
    flat, tree = tree_flatten(tuple(node.args))
    leaves: list[object] = []
    tensors: list[Node] = []
    sizes: list[Node] = []
    for x in flat:
        graph = submodule(module, x)
        if graph is not None or not isinstance(x, Node):
            leaves.append(x if graph is None else graph)
            continue
        is_tensor = isinstance(x.meta.get("val"), Tensor)
        (tensors if is_tensor else sizes).append(x)
        leaves.append(_Operand(is_tensor))
    if node.target is INVOKE:
        leaves[1] = ""  # the name of the sub-graph, which may differ between calls of the same sub-graph
    return Region(node.target, tuple(leaves), tree), tensors, sizes  # type: ignore[arg-type]


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


def _fake_scan(
    combine: GraphModule, init: Sequence[Tensor], xs: Sequence[Tensor], more: Sequence[Tensor | IntLikeType]
) -> list[Tensor]:
    results = combine(*init, *(x[0] for x in xs), *more)
    stacked = [x.new_empty([xs[0].shape[0], *x.shape]) for x in results[len(init) :]]
    return [*results[: len(init)], *stacked]


_FAKE_KERNELS: dict[HigherOrderOperator, Callable[..., Sequence[Tensor]]] = {
    _higher_order.cond: lambda pred, true, false, operands: true(*operands),
    _higher_order.while_loop: lambda cond, body, carried, more: carried,
    _higher_order.scan: _fake_scan,
    _higher_order.map_impl: lambda body, xs, more: _fake_scan(body, (), xs, more),
    _higher_order.invoke_subgraph: lambda called, name, *operands: called(*operands),
}
