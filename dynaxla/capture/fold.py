"""Work that depends on weights alone, split off so that it runs once per weight version."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.torch_api.overloads import OpOverload

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
_GROWTH = 2  # a folded value stays resident: at most this many times the bytes it was made from


@dataclass(frozen=True, slots=True)
class WeightSplit:
    """A part, split into what its weights alone determine and the rest.

    Attributes:
        main: the rest; its placeholders are [kept weights, folded values, the part's other inputs in order].
        fold: the weight-only graph, from the weights at `folded` to the folded values; None where nothing is folded.
        kept: which weights (positions in the given order) `main` reads.
        folded: which weights `fold` reads.
    """

    main: GraphModule
    fold: Graph | None
    kept: tuple[int, ...]
    folded: tuple[int, ...]


def split_weight_work(module: GraphModule, weights: Sequence[Node], enabled: bool) -> WeightSplit:
    """Splits a functional graph. `weights` are the placeholders that keep their values between most calls."""
    cone = _weight_cone(module.graph, weights) if enabled else set()
    values = [n for n in module.graph.nodes if n in cone and n.op != "placeholder" and _worth_folding(n, cone)]
    fold, sources = _fold_graph(module.graph, values)
    live = _live_nodes(module.graph, set(values))
    main = _main_graph(module, weights, values, live)
    kept = tuple(i for i, w in enumerate(weights) if w in live)
    folded = tuple(i for i, w in enumerate(weights) if w in sources)
    return WeightSplit(main, fold if values else None, kept, folded)


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
    if torch.Tag.nondeterministic_seeded in node.target.tags:
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


def _fold_graph(graph: Graph, values: Sequence[Node]) -> tuple[Graph, set[Node]]:
    needed = {n for value in values for n in _ancestors(value)}
    fold = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = fold.node_copy(node, copies.__getitem__)
    fold.output(tuple(copies[value] for value in values))
    return fold, {n for n in needed if n.op == "placeholder"}


def _main_graph(
    module: GraphModule, weights: Sequence[Node], values: Sequence[Node], live: Collection[Node]
) -> GraphModule:
    main = Graph()
    copies: dict[Node, Node] = {}
    for weight in weights:
        if weight in live:
            copies[weight] = main.node_copy(weight)
    for value in values:
        copies[value] = main.placeholder(f"folded_{value.name}")
        copies[value].meta = {"val": value.meta["val"]}
    for node in module.graph.nodes:
        if node.op == "placeholder" and node not in copies and node not in weights:
            copies[node] = main.node_copy(node)
        elif node in live and node not in copies:
            copies[node] = main.node_copy(node, copies.__getitem__)
    return GraphModule(module, main)


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
