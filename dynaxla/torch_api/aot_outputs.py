"""Where AOTAutograd makes outputs that share memory otherwise than eager, or takes other gradients of them: mended here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, OutputType
from torch._guards import TracingContext
from torch.fx import Graph, Node

from dynaxla.torch_api.fakes import memory_of
from dynaxla.torch_api.graph_writes import has_overlap


@cache
def take_gradients_of_overlaps() -> None:
    """Has gradients of results whose elements share memory be taken as they are, once per process.

    AOTAutograd copies a gradient into memory with the strides of the result. In those of `x.unfold(0, 2, 1)` elements lie in
    one place, of which the last one written remains.

    Relies on `MemoryFormatMeta.from_tensor`, and on its `stride`, which is None where a gradient's strides are its own.
    """
    choose: Callable[..., Any] = MemoryFormatMeta.from_tensor

    def choose_format(t: Tensor, force_use_memory_format: bool = False) -> Any:
        format = choose(t, force_use_memory_format)
        overlaps = format is not None and format.stride is not None and has_overlap(t)
        return choose(t, True) if overlaps else format

    MemoryFormatMeta.from_tensor = staticmethod(choose_format)  # type: ignore[assignment]


@cache
def copy_what_is_no_view() -> None:
    """Has an output be a view of a copy of an input that it cannot be a view of, once per process.

    AOTAutograd computes `x[None].reshape(-1)` of an input that was written to from the written value, which is dense. If the
    input is not, eager's reshape copies.

    Relies on `runtime_wrappers.gen_alias_from_base`, which generated code finds by its global name, and which raises where the
    base has other strides.
    """
    wrappers: Any = runtime_wrappers
    make_alias: Callable[..., Tensor] = wrappers.gen_alias_from_base

    def make(base: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return make_alias(base, *args, **kwargs)
        except RuntimeError:
            if base.is_contiguous():
                raise
            return make_alias(base.clone(), *args, **kwargs)

    wrappers.gen_alias_from_base = make


@cache
def make_detached_outputs_of_others() -> None:
    """Has an output that is another one, detached, be made of that one as it is, once per process.

    AOTAutograd applies to the other output the views by which both came from the tensor that made their memory, once more:
    `y = (x * 2).t(); return y, y.detach()` gives what is transposed twice.

    Relies on `runtime_wrappers._HANDLER_MAP`, on `view_meta_sequence` of the handlers, and that outputs without a gradient that
    are made of another output are like it.
    """
    kind = OutputType.alias_of_intermediate_base_is_user_output
    handlers: dict[OutputType, Any] = runtime_wrappers._HANDLER_MAP
    make_handler = handlers[kind]

    def make(info: Any, metadata: Any, trace_joint: bool) -> Any:
        handler = make_handler(info, metadata, trace_joint)
        if not info.requires_grad:
            handler.view_meta_sequence, handler.replay_views = SimpleNamespace(sequence=[]), True
        return handler

    handlers[kind] = make


def detach_views_of_saved(forward: Graph, saved: Collection[int]) -> None:
    """Has a backward raise, as eager's, where an output was written to that is a view of what it reads.

    AOTAutograd gives the output of `x.exp().t()` by `aten._unsafe_view`, so that autograd does not take it for a view. That
    does not share the version of the tensor that is saved, and the gradient would be taken of what was written. A detached
    view is none to autograd, either, and shares it.

    Args:
        saved: positions of the outputs that are kept for the backward alone.

    Relies on `fw_metadata` of the tracing context with `unsafe_view_out_indices` and `num_unsafe_view_outputs`, of which the
    code that gives the outputs is made after the forward is compiled, and on `tokens` and `mutated_inp_runtime_indices`, whose
    results precede the outputs.
    """
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is None or not known.unsafe_view_out_indices:
        return
    output = forward.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    read = {memory_of(value) for value in map(_value_of, (results[i] for i in saved)) if _lies_in_memory(value)}
    first = len(known.tokens) + len(known.mutated_inp_runtime_indices)
    for index in list(known.unsafe_view_out_indices):
        value = _value_of(results[first + index])
        if _lies_in_memory(value) and memory_of(value) in read:
            results[first + index] = _detach(forward, results[first + index])
            known.unsafe_view_out_indices.remove(index)
    known.num_unsafe_view_outputs = len(known.unsafe_view_out_indices)
    output.args = (tuple(results),)


def _value_of(result: object) -> object:
    return result.meta.get("val") if isinstance(result, Node) else None


def _lies_in_memory(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _detach(graph: Graph, view: Node) -> Node:
    with graph.inserting_before(graph.output_node()):
        detached = graph.call_function(torch.ops.aten.detach.default, (view,))
    detached.meta.update(view.meta)
    return detached
