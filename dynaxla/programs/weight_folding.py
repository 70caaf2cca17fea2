"""Work that depends on weights alone, split off so that it runs once per weight version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from dynaxla.custom_ops.constrain import UNSHARD
from dynaxla.torch_api.fakes import mode_of
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves
from dynaxla.types import DEVICE_TYPE

aten = torch.ops.aten

# These cost nothing in a compiled program: alone they are not worth a second copy of a weight.
_FREE = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
_SMALL, _FEW = 1024, 32
"""Weights of at most so many elements are packed into one, where there are so many of them: an argument costs 0.2 us a call."""

_GROWTH = 2  # a folded value stays resident: at most this many times the bytes it was made from


@dataclass(frozen=True, slots=True)
class WeightSplit:
    """A part, split into what its weights alone determine and the rest.

    Attributes:
        main: the rest; its placeholders are [kept weights, folded values, the part's other inputs in order].
        fold: the weight-only graph, from the weights at `folded` to the folded values; None where nothing is folded.
        kept: which weights (positions in the given order) `main` reads.
        folded: which weights `fold` reads.
        packs: how many of the folded values, the last ones, are many small weights in one.
    """

    main: GraphModule
    fold: Graph | None
    kept: tuple[int, ...]
    folded: tuple[int, ...]
    packs: int = 0


def split_weight_work(module: GraphModule, weights: Sequence[Node], enabled: bool, packs: bool = False) -> WeightSplit:
    """Splits a functional graph. `weights` are the placeholders that keep their values between most calls.

    Args:
        enabled: whether there is a fold.
        packs: whether the fold also puts many small weights into one value, of which the rest takes its parts.
    """
    cone = _weight_cone(module.graph, weights) if enabled else set()
    values = [n for n in module.graph.nodes if n in cone and n.op != "placeholder" and _worth_folding(n, cone)]
    live = _live_nodes(module.graph, set(values))
    packed = _packed(module.graph, [w for w in weights if w in live]) if enabled and packs else []
    taken = {weight for pack in packed for weight in pack}
    fold, sources = _fold_graph(module.graph, values, packed)
    main = _main_graph(module, [w for w in weights if w not in taken], values, packed, live)
    kept = tuple(i for i, w in enumerate(weights) if w in live and w not in taken)
    folded = tuple(i for i, w in enumerate(weights) if w in sources)
    return WeightSplit(main, fold if values or packed else None, kept, folded, len(packed))


def is_elementwise(graph: Graph) -> bool:
    """Whether each call of a graph is elementwise, or moves nothing: XLA makes one loop or a few of it."""
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    return all(isinstance(op, OpOverload) and (op in _FREE or torch.Tag.pointwise in op.tags) for op in calls)


def _packed(graph: Graph, weights: Sequence[Node]) -> list[list[Node]]:
    """Small weights that are put into one value, those of each dtype; not those that are handed through."""
    groups: dict[torch.dtype, list[Node]] = {}
    handed_through = graph.output_node().all_input_nodes
    for weight in weights:
        value = weight.meta["val"]
        small = all(isinstance(size, int) for size in value.shape) and 0 < value.numel() <= _SMALL
        if small and value.is_contiguous() and value.device.type == DEVICE_TYPE and weight not in handed_through:
            groups.setdefault(value.dtype, []).append(weight)
    return [group for group in groups.values() if len(group) >= _FEW]


def _weight_cone(graph: Graph, weights: Sequence[Node]) -> set[Node]:
    cone = set(weights)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and cone.issuperset(inputs) and _is_foldable(node):
            cone.add(node)
    return cone


def _is_foldable(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target is UNSHARD:  # which would be kept whole
        return False
    return all(isinstance(size, int) for size in value.shape)


def _worth_folding(node: Node, cone: Collection[Node]) -> bool:
    """Whether a value of the cone is used outside it, took work, and does not outgrow what it was made from."""
    users = list(node.users)
    if all(user in cone for user in users) or any(user.op == "output" for user in users):
        return False
    ancestors = _ancestors(node)
    if all(n.target in _FREE for n in ancestors if n.op != "placeholder"):
        return False
    source_bytes = sum(_bytes(n) for n in ancestors if n.op == "placeholder")
    return _bytes(node) <= _GROWTH * source_bytes


def _ancestors(node: Node) -> list[Node]:
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found:
            found[current] = None
            stack.extend(current.all_input_nodes)
    return list(found)


def _bytes(node: Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _fold_graph(graph: Graph, values: Sequence[Node], packed: Sequence[Sequence[Node]]) -> tuple[Graph, set[Node]]:
    needed = {n for value in values for n in _ancestors(value)}.union(*packed)
    fold = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = fold.node_copy(node, copies.__getitem__)
    packs = [_pack(fold, [copies[weight] for weight in pack]) for pack in packed]
    fold.output((*(copies[value] for value in values), *packs))
    return fold, {n for n in needed if n.op == "placeholder"}


def _pack(graph: Graph, weights: Sequence[Node]) -> Node:
    flat = [_shaped(graph, weight, [weight.meta["val"].numel()]) for weight in weights]
    return _call(graph, aten.cat.default, (flat, 0))


def _unpack(graph: Graph, pack: Node, weights: Sequence[Node]) -> list[Node]:
    """The packed weights, by one call: each distinct call takes time to lower."""
    sizes = [weight.meta["val"].numel() for weight in weights]
    parts = _call(graph, aten.split_with_sizes.default, (pack, sizes))
    taken = [_call(graph, getitem, (parts, number)) for number in range(len(weights))]
    return [_shaped(graph, part, list(w.meta["val"].shape)) for part, w in zip(taken, weights, strict=True)]


def _shaped(graph: Graph, node: Node, sizes: list[int]) -> Node:
    """Vectors, as most small weights are, stay as they are."""
    return node if list(node.meta["val"].shape) == sizes else _call(graph, aten.view.default, (node, sizes))


def _call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    """A call behind all that a graph has, with a fake value."""
    made = graph.call_function(target, args)
    operands = map_arg(args, lambda node: node.meta["val"])
    fake = next(value for value in tree_leaves(operands) if isinstance(value, torch.Tensor))
    with mode_of(fake):
        made.meta["val"] = target(*operands)
    return made


def _main_graph(
    module: GraphModule,
    weights: Sequence[Node],
    values: Sequence[Node],
    packed: Sequence[Sequence[Node]],
    live: Collection[Node],
) -> GraphModule:
    main = Graph()
    copies: dict[Node, Node] = {}
    for weight in weights:
        if weight in live:
            copies[weight] = main.node_copy(weight)
    for value in values:
        copies[value] = _given(main, f"folded_{value.name}", value.meta["val"])
    packs = [_given(main, f"packed_{i}", _value_of_pack(pack)) for i, pack in enumerate(packed)]
    held = {*weights, *(weight for pack in packed for weight in pack)}
    for node in module.graph.find_nodes(op="placeholder"):
        if node not in held:
            copies[node] = main.node_copy(node)
    for pack, members in zip(packs, packed, strict=True):
        copies.update(zip(members, _unpack(main, pack, members), strict=True))
    for node in module.graph.nodes:
        if node in live and node not in copies and node.op != "placeholder":
            copies[node] = main.node_copy(node, copies.__getitem__)
    return GraphModule(module, main)


def _given(graph: Graph, name: str, value: Any) -> Node:
    made = graph.placeholder(name)
    made.meta = {"val": value}
    return made


def _value_of_pack(weights: Sequence[Node]) -> Any:
    graph = Graph()
    return _pack(graph, [_given(graph, weight.name, weight.meta["val"]) for weight in weights]).meta["val"]


def _live_nodes(graph: Graph, cut: set[Node]) -> set[Node]:
    """Nodes that the outputs need once the values in `cut` are given."""
    live: set[Node] = set()
    stack = [graph.output_node()]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(n for n in node.all_input_nodes if n not in cut)
    return live - cut
