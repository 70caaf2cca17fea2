"""Calls of a compiled graph without AOTAutograd's wrapper, where all that the wrapper does is to disable gradients."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from functools import cache
from inspect import CO_VARARGS
from types import FunctionType
from typing import Any

import torch
from torch._functorch._aot_autograd.runtime_wrappers import SerializableCompiledFunction
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import tracing
from torch.fx import Graph, GraphModule

from dynaxla.torch_api.aot import box_function
from dynaxla.torch_api.dynamo import find_undisabled


def call_directly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that calls a compiled graph as AOTAutograd's function of it does, but without its wrapper.

    The first call has the wrapper, which then compares the memory of custom ops' results, and so have calls in torch's
    profiles, which show it. A function whose wrapper does more is returned as it is.

    Relies on `aot_module_simplified` returning a function over `compiled_fn` and `params_buffers_flat`; on `RuntimeWrapper`
    making one over `_inner_compiled_fn`, the compiled graph, and `_codegen_runtime_wrapper`, whose code is compared with that
    of a negation; on `SerializableCompiledFunction.compiled_fn`; and on `torch._C._set_grad_enabled`.
    """
    whole = find_undisabled(function)
    found = _find_graph(whole)
    if found is None:
        return function
    graph, is_called = found, False
    is_grad_enabled, set_grad_enabled, profiler = (
        torch.is_grad_enabled,
        torch._C._set_grad_enabled,
        torch.autograd.profiler,
    )

    @functools.wraps(whole)
    def run(*args: Any) -> Any:
        nonlocal is_called
        if not is_called or profiler._is_profiler_enabled:
            results = whole(*args)
            is_called = True
            return results
        if not is_grad_enabled():
            return graph([*args])
        set_grad_enabled(False)
        try:
            return graph([*args])
        finally:
            set_grad_enabled(True)

    return run


def _find_graph(whole: Callable[..., Any]) -> Callable[[list[Any]], Any] | None:
    """The compiled graph that a function of AOTAutograd's calls; None if it does more."""
    outer = _closure_of(whole)
    if set(outer) != {"compiled_fn", "params_buffers_flat"} or outer["params_buffers_flat"]:
        return None
    if not whole.__code__.co_flags & CO_VARARGS:
        return None
    inner = _closure_of(_unwrap(outer["compiled_fn"]))
    content = _content_of_wrapper(inner)
    if content is None or "_inner_compiled_fn" not in inner or content != _plain_content():
        return None
    return _unwrap(inner["_inner_compiled_fn"])  # type: ignore[no-any-return]


def _unwrap(function: Any) -> Any:
    """The function of one that AOTAutograd can store: of the graph where it captured it, of the whole where it was kept."""
    return function.compiled_fn if isinstance(function, SerializableCompiledFunction) else function


def _closure_of(function: Any) -> Mapping[str, Any]:
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    return {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }


@cache
def _plain_content() -> tuple[Any, ...] | None:
    """What the wrapper of a graph of inference is that writes to no input and none of whose results is a view."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)),))
    with tracing(None), torch.no_grad():
        function = aot_module_simplified(
            GraphModule({}, graph), [torch.zeros(1)], lambda module, _: box_function(lambda args: module(*args))
        )
    return _content_of_wrapper(_closure_of(_closure_of(find_undisabled(function)).get("compiled_fn")))


def _content_of_wrapper(closure: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The code of a wrapper, less the number of results, which is in its constants and messages."""
    wrapper = closure.get("_codegen_runtime_wrapper")
    if not isinstance(wrapper, FunctionType):
        return None
    code = wrapper.__code__
    constants = [re.sub(r"\d+", "", each) if isinstance(each, str) else each for each in code.co_consts]
    return code.co_code, [each for each in constants if type(each) is not int], code.co_names, code.co_varnames
