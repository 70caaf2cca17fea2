"""The state of torch in which Dynamo hands a graph to its backend, in which the graph can be captured again later."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch._functorch import config as _functorch_config
from torch._guards import CompileContext, TracingContext, compile_context, tracing

from dynaxla.torch_api.autocast_lists import autocast_state
from dynaxla.torch_api.dynamo import compile_lock


class CaptureState:
    """What AOTAutograd's capture of a graph depends on beside the graph, as it is when this is made.

    Relies on `TracingContext` and `CompileContext`, which torch itself keeps for a backward that it captures later, and on
    torch's settings being context variables.
    """

    def __init__(self) -> None:
        self._tracing, self._compiling = TracingContext.try_get(), CompileContext.try_get()
        self._variables = contextvars.copy_context()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocasts, self._keeps_casts = autocast_state(), torch.is_autocast_cache_enabled()

    def capture_again(self, capture: Callable[[], Any]) -> Any:
        """Calls a function that captures the graph, with its backward, in this state; returns what it returns.

        It runs in a thread of its own: the caller's may be in the midst of a backward, with keys of the dispatcher excluded.
        Relies on the setting `force_non_lazy_backward_lowering`.
        """
        with compile_lock, ThreadPoolExecutor(1) as executor:
            return executor.submit(self._variables.copy().run, self._capture, capture).result()

    def _capture(self, capture: Callable[[], Any]) -> Any:
        with ExitStack() as state:
            state.enter_context(tracing(self._tracing))
            state.enter_context(compile_context(self._compiling))
            state.enter_context(torch.inference_mode(self._inference))
            state.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype in self._autocasts:
                state.enter_context(torch.autocast(device, dtype, cache_enabled=self._keeps_casts))
            state.enter_context(_functorch_config.patch(force_non_lazy_backward_lowering=True))
            return capture()
