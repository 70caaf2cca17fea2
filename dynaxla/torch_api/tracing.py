"""Traces a function into a graph of ATen calls without changing process-wide state, as torch's own ways of tracing do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dynaxla.torch_api.fakes import disable_modes
from dynaxla.torch_api.modules import graph_module

__all__ = ["TorchDispatchMode"]
# TorchDispatchMode: a context manager whose `__torch_dispatch__(func, types, args, kwargs)` runs every op of its block.


def accept_symbolic_sizes() -> AbstractContextManager[Any]:
    """Context in which torch's composite ops accept symbolic sizes. Relies on `enable_python_dispatcher`."""
    return enable_python_dispatcher()  # type: ignore[no-any-return]


@contextmanager
def enable_dispatch() -> Iterator[None]:
    """Context in which only modes of its own see ops, also within torch's blocks without dispatch, where tracing would end the
    process.

    Relies on `_ForceDispatchKeyGuard`, on the keys that `torch._C._DisableTorchDispatch` excludes, and on
    `_disable_current_modes`.
    """
    keys = torch._C.DispatchKey
    with disable_modes():
        included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded.remove(keys.Python).remove(keys.PythonTLSSnapshot)):
            yield


def pause_tracing() -> AbstractContextManager[Any]:
    """Context within `trace_calls` in which calls do not become part of the graph. Relies on `disable_proxy_modes_tracing`."""
    return disable_proxy_modes_tracing()


def is_functionalized(tensor: torch.Tensor) -> bool:
    """Whether AOTAutograd traces the caller and has wrapped a tensor. Relies on `FunctionalTensor`."""
    return isinstance(tensor, FunctionalTensor)


def call_without_token(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Calls an op that has an effect, and no results, on AOTAutograd's functional tensors: its graph has the call itself.

    Relies on `disable_functional_mode` and on `FunctionalTensor.from_functional`, behind which only the trace sees the call;
    and on torch's elimination of dead code, which keeps the call of an op that is registered to have an effect.
    """
    below = tree_map_only(FunctionalTensor, FunctionalTensor.from_functional, args)
    with disable_functional_mode():
        op(*below, **kwargs)


def run_fake_kernel(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the fake results of a call within the mode of its arguments; None if torch has no fake kernel for it."""
    try:
        return function(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        return None


def trace_calls(
    function: Callable[..., Any],
    examples: Sequence[torch.Tensor | torch.SymInt],
    rewrites: Mapping[OpOverload, Callable[..., Any]],
) -> GraphModule:
    """Traces a function into a graph of ATen calls. `examples` are fake tensors and sizes; call it within their mode.

    Safe in several threads, also beside captures. make_fx is not: it patches `torch.nn.Module`, sets a process-wide
    flag of tracing, which makes other threads' calls of compiled functions raise, and mixes up the sub-graphs of
    several threads' traces.

    Relies on `ProxyTorchDispatchMode` and `PythonKeyTracer`, whose nodes have fake tensors in `meta["val"]`. Control
    flow needs make_fx, and is not supported here.

    Args:
        examples: one for each input, tensors and sizes, no two the same object.
        rewrites: the functions to call instead of these ops.
    """
    tracer = PythonKeyTracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = torch.nn.Module(), Graph(tracer_cls=PythonKeyTracer), {}
    inputs = [tracer.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(len(examples))]
    track_tensor_tree(list(examples), inputs, constant=None, tracer=tracer)
    with disable_autocast_cache(), ProxyTorchDispatchMode(tracer, "real", decomposition_table=rewrites):
        results = function(*examples)
    proxies = tree_map_only(torch.Tensor, lambda x: get_proxy_slot(x, tracer, x, lambda found: found.proxy), results)
    tracer.create_node("output", "output", (tracer.create_arg(proxies),), {})
    return graph_module(tracer.root, tracer.graph)
