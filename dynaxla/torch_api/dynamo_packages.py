"""Dynamo's captures on disk (`caching_precompile`): fixes errors of torch 2.13 with functions behind `functools.wraps`.

Errors of torch, each of which makes a second process fail in the user's call:

- a function that its qualified name does not lead to, such as every wrapper, is saved as a blank, though guards read its
  defaults and closure;
- torch takes the compiled function's `__module__` for the module whose globals it uses, but a wrapper's `__module__` is a copy;
- bytecode loads modules and other objects from globals that Dynamo created, which are not created again;
- names of globals that Dynamo creates are counted from 0 in every process, and collide with saved names;
- guards that cannot be saved, and entries that cannot be loaded, raise.

And two that give wrong results:

- the second process reads the values that guards compare with from its own modules and classes, so that it misses a value that
  changed in between: here an entry whose guards do not read as when they were saved is not used;
- guards on functions are dropped, and all functions behind one wrapper share its code, so that all would get the first one's
  result: here a guard checks that functions have the same code as before.

Each fix calls torch's own function for the rest, and does nothing while `caching_precompile` is off. Relies on
`torch._dynamo.guards` (`GuardsStatePickler`, its `guard_tree_values` and `_unpickle_nested_function`;
`CheckFunctionManager`), `torch._dynamo.package` (`CompilePackage`, `load_guard_manager`), and `CleanupManager`, which
lists the globals of a bytecode.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from types import CodeType, ModuleType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _reset_precompile_entries
from torch._dynamo import config, guards, output_graph, package, symbolic_convert
from torch._dynamo.exc import PackageError
from torch._dynamo.utils import CleanupManager

from dynaxla.torch_api.dynamo_guards import (
    Pickler,
    check_guards_unchanged,
    module_of,
    save_function_code,
    skip_unpicklable_guards,
)
from dynaxla.torch_api.gc_guard import pause_collection

_logger = logging.getLogger("dynaxla")

_SIGNATURES: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "unique_id": (output_graph, ("name", "with_uuid")),
    "GuardsStatePickler._unpickle_nested_function": (guards, ("code", "module", "qualname", "argdefs", "closure")),
    "GuardsStatePickler.reducer_override": (guards, ("self", "obj")),
    "CheckFunctionManager.serialize_guards": (guards, ("self", "builder", "sorted_guards", "output_graph")),
    "pickle_guards_state": (guards, ("state", "builder")),
    "CompilePackage.initialize": (package, ("self", "fn", "dynamo", "ignore_inlined_sources")),
    "CompilePackage.install": (package, ("self", "backends")),
    "CompilePackage.uninstall": (package, ("self",)),
    "CompilePackage.add_guarded_code": (package, ("self", "guards_state", "dynamo_code")),
    "load_guard_manager": (package, ("guards_state", "target_code", "runtime_global_scope")),
}
"""The functions that are replaced: the module of each, and the parameters that the replacement expects."""

_RESTORED_PREFIXES = ("__builtins_dict__",)
"""Prefixes of Dynamo's globals that torch itself restores."""


@cache
def mend_packages() -> bool:
    """Replaces torch's functions in place, once per process. Returns False, without a change, if signatures differ."""
    if not all(_has_expected_signature(name) for name in _SIGNATURES):
        _logger.info("Dynamo's captures on disk are left as torch %s has them", torch.__version__)
        return False
    for module in (output_graph, symbolic_convert):
        _replace(module, "unique_id", _unique_names)
    guards.GuardsStatePickler = Pickler  # type: ignore[misc]
    _replace(guards, "pickle_guards_state", save_function_code)
    _replace(guards.CheckFunctionManager, "serialize_guards", skip_unpicklable_guards)
    _replace(package.CompilePackage, "initialize", _fix_module)
    _replace(package.CompilePackage, "install", _fix_install)
    _replace(package.CompilePackage, "add_guarded_code", _save_globals)
    _replace(package.CompilePackage, "uninstall", _fix_uninstall)
    _replace(package, "load_guard_manager", check_guards_unchanged)
    return True


def _has_expected_signature(name: str) -> bool:
    found: Any
    found, parameters = _SIGNATURES[name]
    for part in name.split("."):
        found = getattr(found, part, None)
    return callable(found) and tuple(inspect.signature(found).parameters) == parameters


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function by `make(function)`; while `caching_precompile` is off, calls go to the original."""
    unpatched = getattr(owner, name)
    patched = make(unpatched)

    @wraps(unpatched)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (patched if config.caching_precompile else unpatched)(*args, **kwargs)

    setattr(owner, name, dispatch)


def _unique_names(unpatched: Callable[..., str]) -> Callable[..., str]:
    """Wraps `unique_id`: names of globals are unique across processes."""

    def unique_id(name: str, with_uuid: bool = False) -> str:
        return unpatched(name, with_uuid=True)

    return unique_id


def _fix_module(unpatched: Callable[..., None]) -> Callable[..., None]:
    """Wraps `initialize`: the compiled function's module is the one whose globals it uses."""

    def initialize(self: Any, fn: Any, dynamo: Any = None, ignore_inlined_sources: bool = False) -> None:
        with _discard_on_error(self):
            unpatched(self, fn, dynamo, ignore_inlined_sources)
        module = module_of(self._innermost_fn)
        if dynamo is None and module is not None:
            self._codes[self._innermost_fn.__code__].python_module = module.__name__

    return initialize


def _fix_install(unpatched: Callable[..., None]) -> Callable[..., None]:
    def install(self: Any, backends: Any) -> None:
        with _discard_on_error(self), pause_collection():
            unpatched(self, backends)

    return install


@contextmanager
def _discard_on_error(entry: Any) -> Iterator[None]:
    """Context that turns an error in loading an entry into the one error that torch catches, and removes what was loaded."""
    fresh = not entry._initialized
    try:
        yield
    except Exception as error:  # an entry imports modules and unpickles objects
        if entry._innermost_fn is not None and not fresh:
            entry.uninstall()
            for saved in filter(lambda saved: saved.code_source, entry._codes.values()):
                with suppress(AttributeError, LookupError, PackageError):  # the code does not exist, so has no entries
                    _reset_precompile_entries(package._lookup_code(saved))
        entry._initialized, entry._codes = False, {}
        raise RuntimeError(f"what was saved is captured anew: {type(error).__name__}: {error}") from error


def _fix_uninstall(unpatched: Callable[..., None]) -> Callable[..., None]:
    """Wraps `uninstall`: keeps loaded entries of other functions that share a wrapper's code."""

    def uninstall(self: Any) -> None:
        shared = self._innermost_fn.__code__.co_qualname != self._innermost_fn.__qualname__
        if self._installed_globals or not shared:
            unpatched(self)

    return uninstall


def _save_globals(unpatched: Callable[..., None]) -> Callable[..., None]:
    """Wraps `add_guarded_code`: imports modules that the bytecode loads. A capture that references another object is
    not saved, since a second process could not restore the object."""

    def add_guarded_code(self: Any, guards_state: bytes, dynamo_code: CodeType) -> None:
        entry = self._current_entry
        names = set(_names(dynamo_code))
        restored = {*entry.import_sources, *entry.backend_ids, *_function_names(self)}
        for hook in CleanupManager.instance[dynamo_code]:
            if hook.name not in names - restored:
                continue
            value = hook.scope[hook.name]
            if inspect.ismodule(value) and sys.modules.get(value.__name__) is value:
                entry.import_sources[hook.name] = value.__name__
            elif not hook.name.startswith(_RESTORED_PREFIXES):
                _logger.warning("Dynamo's capture of %s is not saved: it holds %s", dynamo_code.co_name, hook.name)
                self.bypass_current_entry()
        unpatched(self, guards_state, dynamo_code)

    return add_guarded_code


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def _function_names(saved: Any) -> Iterator[str]:
    return (name for entry in saved._codes.values() if entry.install_to_global for name in entry.function_names)
