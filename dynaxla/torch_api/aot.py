"""AOTAutograd: its call, what it knows of a graph's inputs, and how it tells forward from backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch._prims.rng_prims as rng_prims
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["aot_autograd", "default_partition"]
# aot_autograd(fw_compiler=, bw_compiler=, inference_compiler=, decompositions=, partition_fn=): a backend of Dynamo's that
#   gives these compilers functional ATen graphs.
# default_partition(joint, inputs, num_fwd_outputs=): forward and backward of a joint graph; it saves what the backward reads.

_FORWARD = ("is_forward", "must_be_in_forward")
_BACKWARD = "is_backward"


@dataclass(frozen=True, slots=True)
class Write:
    """An input that a graph changes.

    Attributes:
        input: which.
        result: the graph's result that is its new value, or, where only metadata changes, the view that says how it lies.
        data: whether elements change.
        metadata: whether sizes, strides or offset change.
        requires_grad: whether autograd follows the input.
    """

    input: int
    result: int
    data: bool
    metadata: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """What AOTAutograd knows of a forward graph's inputs.

    Attributes:
        static: positions of parameters and buffers, which lie in the same memory at every call.
        writes: those that the graph changes.
    """

    static: frozenset[int]
    writes: tuple[Write, ...]


def forward_inputs() -> Inputs | None:
    """Of the graph that AOTAutograd hands to a compiler; None outside of torch.compile.

    Relies on `fw_metadata` of the tracing context: `static_input_indices`, `mutated_inp_runtime_indices`, `input_info` with
    `mutates_data`, `mutates_metadata` and `requires_grad`, and `tokens`, whose results come before the new values of inputs.
    """
    context = TracingContext.try_get()
    found = None if context is None else context.fw_metadata
    if found is None:
        return None
    written = enumerate(found.mutated_inp_runtime_indices, start=len(found.tokens))
    infos = [(index, result, found.input_info[index]) for result, index in written]
    writes = tuple(
        Write(index, result, info.mutates_data, info.mutates_metadata, info.requires_grad)
        for index, result, info in infos
    )
    return Inputs(frozenset(found.static_input_indices), writes)


def boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """A compiled graph by AOTAutograd's convention: one list of arguments, which the callee may empty.

    Relies on the attribute `_boxed_call`; without it AOTAutograd gives the arguments one by one.
    """

    def run(args: list[Any]) -> list[Any]:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def is_forward(node: Node) -> bool:
    """Whether a node of a joint graph, or of one cut out of it, is the forward's; those of a user's own backward are not.

    Relies on the tag `meta["partitioner_tag"]`, and its words.
    """
    return node.meta.get("partitioner_tag") in _FORWARD


def is_backward(node: Node) -> bool:
    """Whether a node of a joint graph is the backward's. Relies on `meta["partitioner_tag"]`."""
    return node.meta.get("partitioner_tag") == _BACKWARD


def put_into_backward(node: Node) -> None:
    """Has a node of a joint graph go into the backward. Relies on `meta["partitioner_tag"]`."""
    node.meta["partitioner_tag"] = _BACKWARD


def is_checkpointed(graph: Graph) -> bool:
    """Whether a checkpoint computes values of a joint graph again in the backward. Relies on `meta["recompute"]`."""
    return any("recompute" in node.meta for node in graph.nodes)


def save_always(node: Node) -> None:
    """Has the forward save a node's value, where a checkpoint would compute it again. Relies on `meta["recompute"]`."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def replays(forward: Graph, backward: Graph) -> Iterator[tuple[Node, Node]]:
    """The calls by which torch draws again in the backward what a checkpoint drew in the forward, each behind its draw.

    Relies on `run_and_save_rng_state`, whose first result is the generator's state, on `run_with_rng_state`, whose first
    operand is it, and on both graphs having the states in one order, as results and as inputs.
    """
    returned: Sequence[Any] = forward.output_node().args[0]  # type: ignore[assignment]
    picks = [item for item in returned if isinstance(item, Node) and item.target is operator.getitem]
    draws = [_caller(pick.args[0], rng_prims.run_and_save_rng_state) for pick in picks if pick.args[1] == 0]
    states = backward.find_nodes(op="placeholder")
    readers = [user for state in states for user in state.users if user.args[0] is state]
    again = [_caller(reader, rng_prims.run_with_rng_state) for reader in readers]
    return zip(filter(None, draws), filter(None, again), strict=True)


def _caller(node: Any, op: Any) -> Node | None:
    return node if isinstance(node, Node) and node.target is op else None
