"""torch.distributed's functional collectives as ops of the processes that run the graph's programs together.

A functional collective names a group of this process's. A program has the groups of all its processes, which every process says
of its own when it makes them (distributed/group_table.py). Collectives of other devices, and those whose groups do not fit
together, stay: eager PyTorch runs them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops.process_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    PERMUTE_TENSOR,
    REDUCE_SCATTER,
)
from dynaxla.distributed.group_table import GroupPartition, group_table
from dynaxla.fx.edit import call_before
from dynaxla.fx.graph_utils import tensors_of
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.types import DEVICE_TYPE

functional = torch.ops._c10d_functional


def _emit_all_reduce(graph: Graph, node: Node, x: Node, groups: tuple[Any, ...], reduction: str) -> Node:
    return call_before(graph, node, ALL_REDUCE, (x, reduction, *groups))


def _emit_broadcast(graph: Graph, node: Node, x: Node, groups: tuple[Any, ...], root: int) -> Node:
    return call_before(graph, node, BROADCAST, (x, root, *groups))


def _emit_all_gather(graph: Graph, node: Node, x: Node, groups: tuple[Any, ...], size: int) -> Node:
    return call_before(graph, node, ALL_GATHER, (x, *groups))


def _emit_reduce_scatter(graph: Graph, node: Node, x: Node, groups: tuple[Any, ...], reduction: str, size: int) -> Node:
    return call_before(graph, node, REDUCE_SCATTER, (x, reduction, *groups))


def _emit_all_to_all(
    graph: Graph, node: Node, x: Node, groups: tuple[Any, ...], received: Sequence[Any], sent: Sequence[Any]
) -> Node:
    return call_before(graph, node, ALL_TO_ALL, (x, *groups))


def _emit_permute(graph: Graph, node: Node, x: Node, groups: tuple[Any, ...], targets: Sequence[int]) -> Node:
    return call_before(graph, node, PERMUTE, (x, targets, *groups))


_EMIT: dict[OpOverload, Callable[..., Node]] = {
    functional.all_reduce.default: _emit_all_reduce,
    functional.all_reduce_coalesced.default: _emit_all_reduce,
    functional.broadcast.default: _emit_broadcast,
    functional.all_gather_into_tensor.default: _emit_all_gather,
    functional.all_gather_into_tensor_coalesced.default: _emit_all_gather,
    functional.reduce_scatter_tensor.default: _emit_reduce_scatter,
    functional.reduce_scatter_tensor_coalesced.default: _emit_reduce_scatter,
    functional.all_to_all_single.default: _emit_all_to_all,
    PERMUTE_TENSOR: _emit_permute,
}


def join_groups(graph: Graph) -> None:
    """Replaces the functional collectives of device tensors, where the groups of all processes fit together."""
    calls = [node for node in graph.nodes if node.target in _EMIT and _is_here(node) and _is_even(node)]
    names = list(dict.fromkeys(str(node.args[-1]) for node in calls))
    partition = group_table().find_partition(names) if names else None
    if partition is None:
        return
    for node in calls:
        _replace(graph, node, partition)
    for node in graph.find_nodes(op="call_function", target=functional.wait_tensor.default):
        if node.args[0].op == "placeholder" or node.args[0].target not in _EMIT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_here(node: Node) -> bool:
    return all(value.device.type == DEVICE_TYPE for value in tensors_of(node))


def _is_even(node: Node) -> bool:
    """Whether a collective's pieces are of one size in all processes: one process does not know the others' sizes."""
    if node.target is not functional.all_to_all_single.default:
        return True
    received, sent = node.args[1:3]
    return len({*received, *sent}) == 1  # type: ignore[misc]


def _replace(graph: Graph, node: Node, partition: GroupPartition) -> None:
    operands, *parameters, name = node.args
    groups = partition.arguments(str(name))
    emit = _EMIT[node.target]  # type: ignore[index]
    if isinstance(operands, Node):
        made = emit(graph, node, operands, groups, *parameters)
        node.replace_all_uses_with(made)
    else:
        several = [emit(graph, node, each, groups, *parameters) for each in operands]  # type: ignore[union-attr]
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(several[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    graph.erase_node(node)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    if context.device.type == DEVICE_TYPE:
        join_groups(graph.module.graph)
    return graph


PASS = Pass(
    "group_collectives",
    _run,
    "functional collectives of device tensors are ops with the groups of all processes that run the program",
)
