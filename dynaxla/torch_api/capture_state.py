"""The state of torch in which Dynamo hands a graph to its backend: what is in no key of it, and how the graph is captured in it
again."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._decomp import decomposition_table
from torch._functorch import config as _functorch_config
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.symbol import SymT, symbol_is_type

from dynaxla.torch_api.autocast_lists import autocast_state
from dynaxla.torch_api.dynamo import compile_lock

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_TRACED = ("Autograd", "Autocast", "Composite", "Functionalize", "FuncTorch")
"""How the names of dispatch keys begin whose kernels run while a graph is traced: of others the shapes alone are asked for."""


class CaptureState:
    """What AOTAutograd's capture of a graph depends on beside the graph, as it is when this is made.

    Relies on `TracingContext` and `CompileContext`, which torch itself keeps for a backward that it captures later, and on
    torch's settings being context variables.

    Args:
        inputs: of the call that is captured.

    Attributes:
        inputs: the fake tensors of Dynamo's for them: a function that is kept would keep the memory of the tensors, and the
            weights of a model that is no longer used. Relies on `FakeTensorMode.from_tensor` remembering them.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._tracing, self._compiling = TracingContext.try_get(), CompileContext.try_get()
        mode = None if self._tracing is None else self._tracing.fake_mode
        self.inputs = [x if mode is None or not _is_plain_tensor(x) else mode.from_tensor(x) for x in inputs]
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


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)


def find_replaced_formula() -> str | None:
    """Returns an op of torch's for which a kernel or a decomposition of the user's runs while a graph is traced.

    Relies on `torch.library._impls`, the kernels of Python by "aten/gelu/AutogradCPU"; on the text of `_dispatch_dump`, which
    has the file of each; and on `torch._decomp.decomposition_table`.
    """
    for name in tuple(torch.library._impls):  # other threads may add to it
        space, op, key = name.split("/")
        if space == "aten" and key.startswith(_TRACED):
            files = re.findall(r"registered at (\S+\.py):", torch._C._dispatch_dump(f"aten::{op}"))
            if not all(file.startswith(_OWN) for file in files):
                return f"aten.{op}"
    for overload, decompose in tuple(decomposition_table.items()):
        if decompose.__module__.partition(".")[0] not in ("torch", "dynaxla"):
            return str(overload)
    return None


def is_guarded_by_memory() -> bool:
    """Whether AOTAutograd guards on how inputs of the current capture share memory. A stored capture does not say so.

    Relies on `TracingContext.guards_context.aotautograd_guards`.
    """
    context = TracingContext.try_get()
    return context is not None and bool(context.guards_context.aotautograd_guards)


def read_floats() -> dict[str, float]:
    """The values of the Python floats that vary in the current capture, by the names of their symbols.

    Relies on `ShapeEnv.backed_var_to_val`, and on `symbol_is_type`.
    """
    env = _shape_env()
    values = {} if env is None else env.backed_var_to_val
    return {symbol.name: float(value) for symbol, value in values.items() if symbol_is_type(symbol, SymT.FLOAT)}


def find_fixed_floats() -> list[str]:
    """The names of those of which tracing made constants (`int(m)`, the bound of a clamp), and on which it guards.

    Relies on `ShapeEnv.guards`.
    """
    env = _shape_env()
    symbols = (symbol for guard in ([] if env is None else env.guards) for symbol in guard.expr.free_symbols)
    return sorted({symbol.name for symbol in symbols if symbol_is_type(symbol, SymT.FLOAT)})


def guard_floats(names: Collection[str]) -> None:
    """Has Dynamo guard on the values of these floats in the current capture, which is found stored: only guards on sizes are
    stored with one.

    Relies on `ShapeEnv.evaluate_expr`, which guards on what it is asked.
    """
    env = _shape_env()
    for symbol, value in [] if env is None else list(env.backed_var_to_val.items()):
        if symbol.name in names:
            env.evaluate_expr(sympy.Eq(symbol, value))


def _shape_env() -> Any:
    """Relies on `TracingContext.fake_mode`."""
    context = TracingContext.try_get()
    return None if context is None or context.fake_mode is None else context.fake_mode.shape_env
