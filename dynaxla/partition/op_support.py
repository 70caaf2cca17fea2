"""Decides whether a node can be compiled, from the op table alone: nothing is compiled to find out."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dynaxla.decompositions.assertions import ASSERTIONS, CHECK_FACTORIZATION
from dynaxla.diagnostics import FallbackReason, ReasonId, user_frame
from dynaxla.errors import (
    CompileCrashed,
    CompileError,
    CompileOutOfMemory,
    CompileTimeout,
    CompileUnavailable,
    LinkError,
    LoweringCrashed,
    LoweringOutOfMemory,
    LoweringTimeout,
    LoweringUnavailable,
)
from dynaxla.fx.graph_utils import opaque_class_of, tensors_of
from dynaxla.fx.permutations import is_dense
from dynaxla.ops.dtypes import XLA_DTYPES
from dynaxla.ops.record import Record
from dynaxla.torch_api.fakes import captured_value, get_view_base, is_given_fake, is_view
from dynaxla.torch_api.graph_writes import writes_to_an_overlap
from dynaxla.torch_api.input_memory import find_strided_inputs, writes_at_a_place
from dynaxla.torch_api.overloads import HigherOrderOperator, OpOverload, base_name, results
from dynaxla.torch_api.symbols import example, is_read_value
from dynaxla.torch_api.transforms import is_functional
from dynaxla.types import DEVICE_TYPE, KEPT_VIEW

_COPY_INTO = "write into it, x.copy_(y), or set .data outside of the compiled function"
_COMPILE_TRANSFORM = "call it outside, or compile what transforms, as torch.compile(lambda x, t: jvp(f, (x,), (t,)))"
_GIVE_DENSE = "call it with x.to_dense()"
_GIVE_DATA = "call it with tensors that have data, or compile for shapes alone by dynaxla.compile_for_target"
_RESIZE = "resize it outside of the compiled function"
_FEWER_RESULTS = "return fewer results, or stack those that are differentiated by turns"
_CLONE = "call it with copies, x.clone()"
_WRITE_TO_COPY = "write to a copy of it: .clone() or .contiguous()"
_COPY = "return a copy of the view, or pass a copy of the expanded tensor: .clone()"
_TAKES_VALUE = "it takes a number that was read"
_FAILURES = {
    LoweringCrashed.id: ReasonId.LOWERING_CRASHED,
    LoweringTimeout.id: ReasonId.LOWERING_TIMEOUT,
    LoweringOutOfMemory.id: ReasonId.LOWERING_OUT_OF_MEMORY,
    LoweringUnavailable.id: ReasonId.LOWERING_UNAVAILABLE,
    LinkError.id: ReasonId.LINK_FAILED,
    CompileError.id: ReasonId.COMPILE_FAILED,
    CompileCrashed.id: ReasonId.COMPILE_CRASHED,
    CompileTimeout.id: ReasonId.COMPILE_TIMEOUT,
    CompileOutOfMemory.id: ReasonId.COMPILE_OUT_OF_MEMORY,
    CompileUnavailable.id: ReasonId.COMPILE_UNAVAILABLE,
}
_HINTS = {
    ReasonId.CUSTOM_OP: "the op belongs to another package; it runs in eager between two executables",
    ReasonId.RANDOM: "eager PyTorch draws these random numbers, between two executables",
    ReasonId.DATA_DEPENDENT: "the result's size depends on values; it runs in eager between two executables",
    ReasonId.READS_VALUE: "a number is read out of a tensor; it runs in eager between two executables",
    ReasonId.HIGHER_ORDER: "it runs in eager between two executables; docs/architecture.md says which control flow is compiled",
    ReasonId.SIDE_EFFECT: "the op has an effect beside its results (it may raise, or print); it runs in eager, in order",
    ReasonId.MISPREDICTED: "correct the op's fake kernel (torch.library.register_fake)",
    ReasonId.NO_LOWERING: "the op runs in eager between two executables; please request a lowering of it",
}


def refusal(node: Node, table: Mapping[OpOverload, Record], device: torch.device) -> FallbackReason | None:
    """Returns why a `call_function` node cannot be part of an executable on `device`, or None if it can."""
    target = node.target
    values = tensors_of(node)
    if (torchs := _refuse_of_torch(node)) is not None:
        return torchs
    if is_size_arithmetic(node) or is_size_check(node):
        return None
    if not values and isinstance(target, OpOverload):
        return _reason(node, ReasonId.READS_VALUE if results(target) else ReasonId.SIDE_EFFECT)
    if not isinstance(target, OpOverload):
        return _refuse_higher_order(node)
    if any(is_read_value(operand.meta.get("val")) for operand in node.all_input_nodes):
        return _reason(node, ReasonId.READS_VALUE, _TAKES_VALUE)
    record = table.get(target)
    if record is None:
        return _reason(node, _missing_record(target))
    operands = [v for n in node.all_input_nodes for v in tensors_of(n)]
    if odd_layouts := {str(v.layout) for v in (*operands, *values) if v.layout is not torch.strided}:
        return _reason(node, ReasonId.UNSUPPORTED_TENSOR, f"layout {', '.join(sorted(odd_layouts))}")
    allowed = XLA_DTYPES if record.dtypes is None else record.dtypes
    if odd := {v.dtype for v in (*operands, *values)} - allowed:
        return _reason(node, ReasonId.UNSUPPORTED_DTYPE, f"dtype {', '.join(sorted(map(str, odd)))}")
    if (away := {str(v.device) for v in values if v.device.type != device.type}) and not _joins(node, device):
        return _reason(node, ReasonId.UNSUPPORTED_CALL, f"it computes on {', '.join(away)}, the rest on {device}")
    message = record.check(node) if record.check is not None else None
    return _reason(node, ReasonId.UNSUPPORTED_CALL, message) if message else None


def _refuse_higher_order(node: Node) -> FallbackReason:
    if (inner := _wrapped(node)) is None:
        return _reason(node, ReasonId.HIGHER_ORDER)
    id = ReasonId.SIDE_EFFECT if node.target is torch.ops.higher_order.with_effects else _missing_record(inner)
    return replace(_reason(node, id, f"torch calls it by {node.target}"), op=str(inner))


def _joins(node: Node, device: torch.device) -> bool:
    """Whether a node computes a CPU scalar that only calls on the device read, such as a number that Dynamo made an
    input. An executable of the device takes CPU scalars."""
    values = tensors_of(node)
    if device.type != DEVICE_TYPE or any(v.dim() or v.device.type != "cpu" for v in values):
        return False
    return all(
        user.op != "output" and (any(v.device.type == DEVICE_TYPE for v in tensors_of(user)) or _joins(user, device))
        for user in node.users
    )


def make_region_reason(node: Node, detail: str) -> FallbackReason:
    """Makes the reason of a higher-order call that runs in eager."""
    return _reason(node, ReasonId.HIGHER_ORDER, detail)


def refuse_inputs(inputs: Sequence[Any]) -> FallbackReason | None:
    """Returns why a graph runs in eager that is captured with these inputs: fake tensors, which then give their shapes alone,
    functional ones, or those of oneDNN's own layout; None for others."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if any(map(is_functional, tensors)):
        return make_surrounded_reason("a captured graph")
    if any(value.is_mkldnn for value in tensors):
        detail = "an input has a layout of oneDNN's, by to_mkldnn()"
        return FallbackReason(ReasonId.UNSUPPORTED_TENSOR, "a captured graph", detail=detail, hint=_GIVE_DENSE)
    if not any(map(is_given_fake, tensors)):
        return None
    detail = "an input is a fake tensor, which has a shape and no data"
    return FallbackReason(ReasonId.UNSUPPORTED_TENSOR, "a captured graph", detail=detail, hint=_GIVE_DATA)


def make_surrounded_reason(what: str) -> FallbackReason:
    """Why a graph, or a call of a part, runs in eager: what surrounds it is to see its ops (`transforms.is_surrounded`)."""
    detail = (
        "a transform or mode around the call sees its ops: forward-mode AD, functionalize, grad with is_grads_batched, "
        "a dispatch mode"
    )
    return FallbackReason(ReasonId.UNSUPPORTED_TENSOR, what, detail=detail, hint=_COMPILE_TRANSFORM)


def make_moved_reason(what: str) -> FallbackReason:
    """Why a call of a captured graph runs in eager whose inputs lie in memory otherwise than when it was captured."""
    detail = (
        "inputs that it writes to share memory otherwise than when it was captured, or share some and views of them are "
        "returned, or as_strided counts from the start of their storage and they lie elsewhere in it"
    )
    return FallbackReason(ReasonId.UNSUPPORTED_TENSOR, what, detail=detail, hint=_CLONE)


def make_many_backwards_reason(what: str) -> FallbackReason:
    """Why a backward runs in eager: a graph is compiled for each of many sets of results that nothing is differentiated of."""
    detail = (
        "nothing is differentiated of some of the forward's results, and too many other sets of them were met before"
    )
    return FallbackReason(ReasonId.UNSUPPORTED_CALL, what, detail=detail, hint=_FEWER_RESULTS)


def capture_refusal(module: GraphModule) -> FallbackReason | None:
    """Returns why AOTAutograd cannot capture a graph of Dynamo's, or would give wrong gradients; None if neither is so."""
    refusals = (
        *(_swapped_input, _resized_memory, _gradient_of_an_overlap, _write_to_an_overlap, _write_at_a_place),
        _strided_view_of_gaps,
    )
    return next(filter(None, (refuse(module) for refuse in refusals)), None)


def _swapped_input(module: GraphModule) -> FallbackReason | None:
    """Refuses `x.data = y` of an input, which AOTAutograd supports only for backends that write to inputs themselves."""
    swaps = module.graph.find_nodes(op="call_function", target=torch.Tensor.set_)
    if not any(isinstance(node.args[0], Node) and node.args[0].op == "placeholder" for node in swaps):
        return None
    detail = "an input is given other memory, as by x.data = y"
    return FallbackReason(ReasonId.SIDE_EFFECT, "a captured graph", detail=detail, hint=_COPY_INTO)


def _resized_memory(module: GraphModule) -> FallbackReason | None:
    """Refuses `x.untyped_storage().resize_(n)`: what reads x before it would be computed after it, of memory that is gone."""
    if not module.graph.find_nodes(op="call_function", target=torch.ops.inductor.resize_storage_bytes_):
        return None
    detail = "the memory of an input is resized, as by x.untyped_storage().resize_(0)"
    return FallbackReason(ReasonId.SIDE_EFFECT, "a captured graph", detail=detail, hint=_RESIZE)


def _gradient_of_an_overlap(module: GraphModule) -> FallbackReason | None:
    """Refuses a graph for which AOTAutograd would give wrong gradients.

    AOTAutograd computes a result that is a view of an input at each call. With symbolic sizes it does so by storage
    positions: elements that share one, such as those of an expanded tensor, then each get the mean of their gradients.
    """
    if not torch.is_grad_enabled() or not module.graph.output_node().args:
        return None
    values = [captured_value(n) for n in module.graph.find_nodes(op="placeholder")]
    shared = [id(get_view_base(v)) for v in values if isinstance(v, torch.Tensor) and v.requires_grad and _overlaps(v)]
    returned = [captured_value(n) for n in module.graph.output_node().all_input_nodes]
    if not any(isinstance(v, torch.Tensor) and is_view(v) and id(get_view_base(v)) in shared for v in returned):
        return None
    detail = "a result is a view of an input whose elements share memory, and which requires a gradient"
    return FallbackReason(ReasonId.UNSUPPORTED_TENSOR, "a captured graph", detail=detail, hint=_COPY)


def _write_to_an_overlap(module: GraphModule) -> FallbackReason | None:
    """Refuses a write to a tensor whose elements share memory: AOTAutograd would write other numbers."""
    if not writes_to_an_overlap(module):
        return None
    detail = "it writes to a tensor several of whose elements lie in one place, such as an expanded one"
    return FallbackReason(ReasonId.SIDE_EFFECT, "a captured graph", detail=detail, hint=_WRITE_TO_COPY)


def _write_at_a_place(module: GraphModule) -> FallbackReason | None:
    """Refuses a write to `as_strided` with an offset that AOTAutograd would make elsewhere in memory."""
    if not writes_at_a_place(module):
        return None
    detail = (
        "it writes to `as_strided` with an offset, of an input that requires a gradient and begins later in its storage"
    )
    return FallbackReason(ReasonId.SIDE_EFFECT, "a captured graph", detail=detail, hint=_CLONE)


def _strided_view_of_gaps(module: GraphModule) -> FallbackReason | None:
    """Refuses `as_strided` of an input with gaps between its elements: a write there is lost, as AOTAutograd copies only the
    elements back."""
    if not any(map(_has_gaps, find_strided_inputs(module))):
        return None
    detail = "it reads or writes by `as_strided` what lies between the elements of an input"
    return FallbackReason(ReasonId.UNSUPPORTED_TENSOR, "a captured graph", detail=detail, hint=_CLONE)


def _has_gaps(value: torch.Tensor) -> bool:
    sizes, strides = (list(map(example, numbers)) for numbers in (value.shape, value.stride()))
    return None in (*sizes, *strides) or not is_dense(torch.empty_strided(sizes, strides, device="meta"))


def _overlaps(value: torch.Tensor) -> bool:
    """Whether several elements share memory, in a tensor with symbolic sizes."""
    if not any(isinstance(size, torch.SymInt) for size in value.shape):
        return False
    strides = value.stride() if value.layout is torch.strided else ()
    return any(
        isinstance(stride, int) and stride == 0 and (isinstance(size, torch.SymInt) or size > 1)
        for size, stride in zip(value.shape, strides, strict=False)
    )


def _refuse_of_torch(node: Node) -> FallbackReason | None:
    """Refuses a call that only torch can make: it moves an input in place, or takes or gives an object such as a device mesh.
    What picks one of several results goes with the call."""
    if node.target is operator.getitem:
        return None
    if KEPT_VIEW in node.meta:
        return _reason(node, ReasonId.UNSUPPORTED_CALL, "an input's sizes or strides change in place")
    names = list(dict.fromkeys(filter(None, map(opaque_class_of, (*node.all_input_nodes, node)))))
    if not names:
        return None
    id = _missing_record(node.target) if isinstance(node.target, OpOverload) else ReasonId.UNSUPPORTED_CALL
    return _reason(node, id, f"it takes or gives an object: {', '.join(names)}")


def _wrapped(node: Node) -> OpOverload | None:
    """Returns the op that a higher-order op of torch's own wraps: a functionalized mutation, a generator's state, an effect."""
    return next((argument for argument in node.args if isinstance(argument, OpOverload)), None)


def is_size_arithmetic(node: Node) -> bool:
    """Whether a node is arithmetic on sizes, a size query or a `getitem`: evaluated by specialization, free per call."""
    if node.target is operator.getitem:
        return True
    if isinstance(node.target, OpOverload):
        return node.target.namespace == "aten" and base_name(node.target).startswith("sym_")
    return not tensors_of(node) and not isinstance(node.target, HigherOrderOperator)


def is_size_check(node: Node) -> bool:
    """Whether a node asserts a condition on sizes: checked at every call, before or between the parts."""
    return node.target is torch.ops.aten._assert_scalar.default and not any(map(tensors_of, node.all_input_nodes))


def is_assertion(node: Node) -> bool:
    """Whether a node asserts that matrices have a factorization, or that a one-element tensor is not zero: eager raises for
    any other tensor."""
    if node.target not in ASSERTIONS:
        return False
    if node.target is CHECK_FACTORIZATION:
        return True
    return all(_is_one_number(value) for operand in node.all_input_nodes for value in tensors_of(operand))


def _is_one_number(value: torch.Tensor) -> bool:
    return not value.is_complex() and all(isinstance(size, int) and size == 1 for size in value.shape)


def failure_reason(node: Node, error_id: str, explanation: str, repro: str | None = None) -> FallbackReason:
    """Makes the reason of a node that the table supports but whose compilation failed with this error."""
    id = _FAILURES.get(error_id, ReasonId.LOWERING_FAILED)
    return replace(_reason(node, id), detail=explanation, repro=repro)


def make_misprediction_reason(node: Node, given: torch.Tensor) -> FallbackReason:
    """Makes the reason why users of a node's result run in eager: the result differs from its fake kernel's."""
    predicted = node.meta["val"]
    detail = (
        f"its result is {_named(given)}, its fake kernel said {_named(predicted)}, so the ops that read it run in eager"
    )
    return _reason(node, ReasonId.MISPREDICTED, detail)


def _named(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def _missing_record(target: OpOverload) -> ReasonId:
    tags = target.tags
    if torch.Tag.nondeterministic_seeded in tags:
        return ReasonId.RANDOM
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return ReasonId.DATA_DEPENDENT
    return ReasonId.NO_LOWERING if target.namespace in ("aten", "prims") else ReasonId.CUSTOM_OP


def _reason(node: Node, id: ReasonId, detail: str | None = "") -> FallbackReason:
    dtypes = [v.dtype for n in (*node.all_input_nodes, node) for v in tensors_of(n)]
    return FallbackReason(
        id=id,
        op=str(node.target),
        dtypes=tuple(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes)),
        frame=user_frame(node),
        hint=_HINTS.get(id, "docs/ops.md lists what is supported of the op"),
        detail=detail or "",
    )
