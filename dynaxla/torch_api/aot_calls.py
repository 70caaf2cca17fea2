"""Calls of a compiled graph without AOTAutograd's wrapper, where all that the wrapper does is to disable gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import cache
from inspect import CO_VARARGS
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._functorch._aot_autograd.runtime_wrappers import SerializableCompiledFunction

from dynaxla.torch_api.dynamo import find_undisabled

_PLAIN_WRAPPER = """\
def _runtime_wrapper(_compiled_fn_, _first_ctx_, _on_before_call_, args):
    orig_inputs = {{}}
    with _first_ctx_():
        grad_enabled = torch.is_grad_enabled()
        try:
            if grad_enabled: torch._C._set_grad_enabled(False)
            _on_before_call_()
            all_outs = _compiled_fn_(args)
            if isinstance(all_outs, tuple):
                all_outs = list(all_outs)
            elif not isinstance(all_outs, list):
                all_outs = [all_outs]
        finally:
            if grad_enabled: torch._C._set_grad_enabled(True)
    del args
    if len(all_outs) != {results}:
        raise AssertionError(f"expected {results} outputs, got {{len(all_outs)}}")
    fw_outs = all_outs
    ret_outs = fw_outs
    return ret_outs
"""
"""The code that AOTAutograd makes for a graph of inference that writes to no input and none of whose results is a view."""


def call_directly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that calls a compiled graph as AOTAutograd's function of it does, but without its wrapper.

    The first call has the wrapper, which then compares the memory of custom ops' results, and so have calls in torch's
    profiles, which show it. A function whose wrapper does more is returned as it is.

    Relies on `aot_module_simplified` returning a function over `compiled_fn` and `params_buffers_flat`; on `RuntimeWrapper`
    making one over `_inner_compiled_fn`, the compiled graph, and `_codegen_runtime_wrapper`, whose code is compared; on
    `SerializableCompiledFunction.compiled_fn`; and on `torch._C._set_grad_enabled`.
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
    inner = _closure_of(outer["compiled_fn"])
    wrapper = inner.get("_codegen_runtime_wrapper")
    if not isinstance(wrapper, FunctionType) or "_inner_compiled_fn" not in inner or not _is_plain(wrapper.__code__):
        return None
    graph = inner["_inner_compiled_fn"]
    return graph.compiled_fn if isinstance(graph, SerializableCompiledFunction) else graph  # type: ignore[no-any-return]


def _closure_of(function: Any) -> Mapping[str, Any]:
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    return {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }


def _is_plain(code: CodeType) -> bool:
    numbers = {each for each in code.co_consts if type(each) is int}
    return any(_content(code) == _content(_plain_code(number)) for number in numbers)


def _content(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_consts, code.co_names, code.co_varnames


@cache
def _plain_code(results: int) -> CodeType:
    module = compile(_PLAIN_WRAPPER.format(results=results), "plain wrapper", "exec")
    return next(each for each in module.co_consts if isinstance(each, CodeType))
