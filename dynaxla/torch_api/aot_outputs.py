"""Where AOTAutograd makes outputs that share memory otherwise than eager, or takes other gradients of them: mended here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, OutputType

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
