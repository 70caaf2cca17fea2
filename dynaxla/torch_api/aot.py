"""AOTAutograd: its call, its analysis of a graph's inputs, and the tags of forward and backward nodes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch._prims.rng_prims as rng_prims
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, TangentAOTInput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx import Graph, Node
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import CheckpointPolicy

from dynaxla.torch_api.symbols import expression

__all__ = ["aot_autograd", "default_partition"]
# aot_autograd(fw_compiler=, bw_compiler=, inference_compiler=, decompositions=, partition_fn=): makes a backend for
#   Dynamo that calls these compilers with functional ATen graphs.
# default_partition(joint, inputs, num_fwd_outputs=): splits a joint graph into forward and
#   backward; the forward returns the values that the backward reads.

PART_OF_JOINT = "partitioner_tag"
"""The key of a joint graph's `meta` that says whether a node is of the forward or of the backward."""

_FORWARD = ("is_forward", "must_be_in_forward")
_BACKWARD = "is_backward"

_NO_DERIVATIVE = re.compile(r"derivative for \S+ is not implemented|returned an invalid gradient at index \d")
_LOST = ("has been modified by an inplace operation", "has been detached in-place")


def is_overwritten(error: Exception) -> bool:
    """Whether autograd refused a graph's backward since the graph writes to a value that it reads, or detaches it in place.

    Relies on autograd's words, as its error is a plain RuntimeError.
    """
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def lacks_derivative(error: Exception) -> bool:
    """Whether autograd has no formula for an op of a graph, or one whose result it refuses: eager raises as soon as its
    gradient is asked for, and a trace of the backward always does.

    Relies on autograd's words, as above.
    """
    return isinstance(error, RuntimeError) and _NO_DERIVATIVE.search(str(error)) is not None


def find_uncaptured_op(error: Exception) -> str | None:
    """The op that a trace came to and of which torch knows no shapes: it has no kernel for fake tensors.

    Relies on `UnsupportedOperatorException`, whose argument is the op.
    """
    return str(error.args[0]) if isinstance(error, UnsupportedOperatorException) else None


def writes_to_strided_view(error: Exception) -> bool:
    """Whether functionalization refused a graph since it writes to `as_strided` of a view, of which it cannot write the base.

    Relies on its words, as above.
    """
    return isinstance(error, RuntimeError) and "as_strided() is non-compositional" in str(error)


def reads_number(error: Exception) -> bool:
    """Whether a trace came to a number that Python reads out of an input: `x[i]` and `torch.ones(i)` do of a tensor of no dims.

    Dynamo knows the number of an input of whole numbers on the CPU, and goes on; AOTAutograd forgets it. Relies on
    `FakeTensorMode.epoch`, which it raises, and on `DataDependentOutputException`.
    """
    return isinstance(error, DataDependentOutputException)


def find_counting_op(error: Exception) -> str | None:
    """The op that a trace came to and whose result has as many elements as values say, in a formula of autograd: a gradient
    of `index_fill` counts the places.

    Relies on `DynamicOutputShapeException`, whose argument is the op.
    """
    return str(error.args[0]) if isinstance(error, DynamicOutputShapeException) else None


@dataclass(frozen=True, slots=True)
class InputWrite:
    """An input that a graph mutates.

    Attributes:
        input: position of the input.
        result: position of the graph's result that holds the new value, or, if only metadata changes, a view with the
            new sizes, strides and offset.
        data: whether the graph writes elements.
        metadata: whether the graph changes sizes, strides or offset.
        requires_grad: whether the input requires gradients.
    """

    input: int
    result: int
    data: bool
    metadata: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """AOTAutograd's analysis of a forward graph's inputs.

    Attributes:
        static: positions of parameters and buffers, whose memory is the same at every call.
        writes: the inputs that the graph mutates.
        views: by the position of a result that AOTAutograd makes a view of an input at each call, that input: of the graph's
            result it reads sizes, strides and offset alone.
    """

    static: frozenset[int]
    writes: tuple[InputWrite, ...]
    views: Mapping[int, int] = field(default_factory=dict)

    @property
    def unread(self) -> frozenset[int]:
        """The results of which no element is read, and which may have those that an input had before the graph wrote to it."""
        written = {write.input for write in self.writes if write.data and not write.metadata}
        return frozenset(result for result, index in self.views.items() if index in written)


def get_forward_inputs() -> GraphInputs | None:
    """Returns the analysis of the inputs of the graph that AOTAutograd is compiling; None outside of torch.compile.

    Relies on `fw_metadata` of the tracing context: `static_input_indices`, `mutated_inp_runtime_indices`, `input_info` with
    `mutates_data`, `mutates_metadata` and `requires_grad`, `output_info` with `output_type` and `base_idx`, and `tokens`, whose
    results precede the new values of inputs, which precede the user's.
    """
    context = TracingContext.try_get()
    found = None if context is None else context.fw_metadata
    if found is None:
        return None
    written = enumerate(found.mutated_inp_runtime_indices, start=len(found.tokens))
    infos = [(index, result, found.input_info[index]) for result, index in written]
    writes = tuple(
        InputWrite(index, result, info.mutates_data, info.mutates_metadata, info.requires_grad)
        for index, result, info in infos
    )
    given = enumerate(found.output_info, start=len(found.tokens) + len(writes))
    views = {
        i: each.base_idx
        for i, each in given
        if each.output_type is OutputType.alias_of_input and each.base_idx is not None
    }
    return GraphInputs(frozenset(found.static_input_indices), writes, views)


def written_inputs(joint: Graph) -> frozenset[int]:
    """Positions of the inputs whose new values a joint graph returns.

    Relies on `meta["desc"]` of its output, which says what each result is: there is no other analysis yet where it is split.
    """
    results = joint.output_node().meta.get("desc", ())
    written = (each.mutated_input for each in results if isinstance(each, InputMutationAOTOutput))
    return frozenset(each.idx for each in written if isinstance(each, PlainAOTInput))


def find_gradients(backward: Graph) -> tuple[int, ...]:
    """Positions of a backward's inputs that are gradients of the forward's results, but for those of tensor subclasses.

    Relies on `meta["desc"]` of the placeholders: `TangentAOTInput`.
    """
    inputs = enumerate(backward.find_nodes(op="placeholder"))
    return tuple(i for i, node in inputs if isinstance(node.meta.get("desc"), TangentAOTInput))


def drop_hidden_gradients(backward: Graph) -> None:
    """Has a backward give no gradient of an input that the forward only writes to, where autograd does not see that
    (`torch.no_grad`, `x.data`).

    AOTAutograd takes the new value for a copy of the input and gives its gradient, which is zeros; eager PyTorch has none, and
    an optimizer leaves such a parameter alone. Relies on `meta["desc"]` of the placeholders (`TangentAOTInput`), and on
    `fw_metadata` of the tracing context with `input_info`: `mutations_hidden_from_autograd` and
    `mutations_under_no_grad_or_inference_mode`.
    """
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is None:
        return
    tangents = [
        node for node in backward.find_nodes(op="placeholder") if isinstance(node.meta.get("desc"), TangentAOTInput)
    ]
    hidden = {node for node in tangents if _is_hidden(node.meta["desc"].output, known.input_info)}
    if hidden:
        output, seen = backward.output_node(), _dependents(set(tangents) - hidden)
        gradients: Any = output.args[0]
        unseen = _dependents(hidden) - seen
        output.args = (tuple(None if each in unseen else each for each in gradients),)


def _is_hidden(written: Any, inputs: Sequence[Any]) -> bool:
    """Whether a result of a forward is the new value of an input that autograd does not see."""
    if not isinstance(written, InputMutationAOTOutput) or not isinstance(written.mutated_input, PlainAOTInput):
        return False
    info = inputs[written.mutated_input.idx]
    return bool(info.mutations_hidden_from_autograd or info.mutations_under_no_grad_or_inference_mode)


def _dependents(nodes: Collection[Node]) -> set[Node]:
    """The nodes and all that is computed of them."""
    found = set(nodes)
    waiting = list(nodes)
    while waiting:
        new = [user for user in waiting.pop().users if user not in found]
        found.update(new)
        waiting.extend(new)
    return found


def box_function(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Marks a compiled graph as one of AOTAutograd's boxed convention: it takes one list of arguments, which it may empty.

    What takes no attributes, as a method, is wrapped. Relies on the attribute `_boxed_call`; without it AOTAutograd passes the
    arguments one by one.
    """
    boxed: Any = function
    try:
        boxed._boxed_call = True
    except AttributeError:
        boxed = lambda args: function(args)  # noqa: E731 (a new function)
        boxed._boxed_call = True
    return boxed  # type: ignore[no-any-return]


@cache
def keep_known_sizes() -> None:
    """Has a trace keep the first number that it met for a symbol, once per process.

    `torch.sym_max(s, 1)` of a size s, which is at least 1, is another number with the expression s. torch then takes it for
    where s comes from: a size with that expression that the trace has not met, as DTensor makes them, is looked up there,
    and the call needs it in turn, without end.

    Relies on `proxy_tensor._sym_register`, which torch calls by its global name, and on a tracer's `sympy_expr_tracker`.
    """
    register: Callable[..., None] = proxy_tensor._sym_register

    def register_number(tracer: Any, func: Any, args: tuple[object, ...], out: object) -> None:
        symbol = expression(out)
        known = tracer.sympy_expr_tracker.get(symbol)
        register(tracer, func, args, out)
        if known is not None:
            tracer.sympy_expr_tracker[symbol] = known

    proxy_tensor._sym_register = register_number


def is_forward(node: Node) -> bool:
    """Whether a node of a joint graph, or of a part of one, is the forward's; nodes of a user's own backward are not.

    Relies on the tag `meta["partitioner_tag"]` and its values.
    """
    return node.meta.get(PART_OF_JOINT) in _FORWARD


def is_backward(node: Node) -> bool:
    """Whether a node of a joint graph belongs to the backward. Relies on `meta["partitioner_tag"]`."""
    return node.meta.get(PART_OF_JOINT) == _BACKWARD


def find_own_backward(node: Node) -> int | None:
    """A number of the call of a user's `autograd.Function` of whose `backward` a node is; None for a formula of autograd.

    Relies on `meta["autograd_backward"]`, on the tag, which such nodes have not, and on `meta["from_node"]`, whose first source
    is of the graph that Dynamo makes of the method for each call. `meta["seq_nr"]` is the same for all.
    """
    is_own = "autograd_backward" in node.meta and node.meta.get(PART_OF_JOINT) is None
    sources = node.meta.get("from_node") if is_own else None
    return sources[0].graph_id if sources else None


def is_gradient_sum(node: Node) -> bool:
    """Whether autograd made a node of a backward to add two gradients of one value. Relies on `meta["is_gradient_acc"]`, which
    hooks have too."""
    return node.target is torch.ops.aten.add.Tensor and bool(node.meta.get("is_gradient_acc"))


def mark_backward(node: Node) -> None:
    """Assigns a node of a joint graph to the backward. Relies on `meta["partitioner_tag"]`."""
    node.meta[PART_OF_JOINT] = _BACKWARD


def module_path(node: Node) -> str:
    """Returns the path of the user's module that a node computes for, "layers.0.attention"; "" where no module has it.

    Relies on `meta["nn_module_stack"]`, which Dynamo makes, on `meta["fwd_nn_module_stack"]`, which AOTAutograd copies from
    a node of the forward to those of its gradient, and on paths that begin with the variable of the model, "L['self']".
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {"": ("", None)}
    path, _ = list(stack.values())[-1]
    return _VARIABLE.sub("", path)


_VARIABLE = re.compile(r"^[LG]\[[^]]*\]\.?")


def is_checkpointed(graph: Graph) -> bool:
    """Whether a checkpoint recomputes values of a joint graph in the backward. Relies on `meta["recompute"]`."""
    return any(map(is_recomputed, graph.nodes))


def is_recomputed(node: Node) -> bool:
    """Whether a checkpoint recomputes a value of a joint graph in the backward. Relies on `meta["recompute"]`."""
    return "recompute" in node.meta


def save_always(node: Node) -> None:
    """Has the forward save a node's value that a checkpoint would recompute. Relies on `meta["recompute"]`."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def pair_replayed_draws(forward: Graph, backward: Graph) -> Iterator[tuple[Node, Node]]:
    """Yields pairs of calls: a random draw of a checkpointed forward, and the call that repeats it in the backward.

    Relies on `run_and_save_rng_state`, whose first result is the generator's state, on `run_with_rng_state`, whose first
    operand is that state, and on the two graphs having the states in the same order, as results and as inputs.
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
