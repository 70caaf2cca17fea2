"""Tensors that a graph holds as attributes, made inputs of it, so that no data is baked into a program."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.fx.graph_utils import attribute
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext


def lift_constants(module: GraphModule) -> tuple[torch.Tensor, ...]:
    """Turns tensors held as attributes into placeholders behind the existing ones; gives the tensors in order."""
    graph = module.graph
    constants: list[torch.Tensor] = []
    last = [n for n in graph.nodes if n.op == "placeholder"]
    by_target: dict[str, Node] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = attribute(module, node)
        if not isinstance(tensor, torch.Tensor):
            continue
        if node.target not in by_target:
            anchor = (by_target and list(by_target.values())[-1]) or (last[-1] if last else None)
            by_target[str(node.target)] = _placeholder_after(graph, anchor, node, f"constant_{len(constants)}")
            constants.append(tensor)
        node.replace_all_uses_with(by_target[str(node.target)])
        graph.erase_node(node)
    return tuple(constants)


def _placeholder_after(graph: Graph, anchor: Node | None, node: Node, name: str) -> Node:
    first = next(iter(graph.nodes))
    with graph.inserting_after(anchor) if anchor is not None else graph.inserting_before(first):
        placeholder = graph.placeholder(name)
    placeholder.meta = dict(node.meta)
    return placeholder


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    return replace(graph, constants=lift_constants(graph.module))


PASS = Pass("constant_lifting", _run, "no node holds a tensor's data: `constants` are inputs behind all others")
