"""Dynamo's own captures on disk (`caching_precompile`): what torch 2.13 loses of functions behind `functools.wraps`, mended.

Mistakes of torch's, of which each makes a second process fail in the user's call:

- a function that its qualified name does not lead to, as of every wrapper, is saved as a blank, though guards read its defaults
  and what it closes over;
- of the function that is compiled, `__module__` is taken for the module whose globals it uses, and a wrapper's is copied;
- bytecode loads modules, and other objects, by globals that Dynamo made, and that are not made again;
- names of globals that Dynamo makes are counted from 0 in every process, and collide with those that were saved;
- guards that cannot be saved, and an entry that cannot be loaded, raise.

And two that make it wrong:

- what guards compare is read in the second process where it stands in a module or a class, so that a value that changed between
  the two is not seen: an entry whose guards do not read as they did is not used;
- guards on functions are dropped, and a wrapper's code is that of all functions that it wraps, which then get the first one's
  result: functions have to have the code that they had.

Each of the mends leaves to torch what torch does right, and does nothing while `caching_precompile` is off. Relies on
`torch._dynamo.guards` (`GuardsStatePickler`, its `guard_tree_values` and `_unpickle_nested_function`; `CheckFunctionManager`),
`torch._dynamo.package` (`CompilePackage`, `load_guard_manager`), and `CleanupManager`, which knows the globals of a bytecode.
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

from dynaxla.torch_api.dynamo_guards import Pickler, as_they_read, left_out, module_of, with_functions
from dynaxla.torch_api.gc_guard import no_collection

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
"""What is mended, where it stands, and the parameters that it had."""

_MADE_AGAIN = ("__builtins_dict__",)
"""How globals of Dynamo's begin that torch itself makes again."""


@cache
def mend_packages() -> bool:
    """Mends torch's functions in place, once per process; False, and nothing is mended, where they are not as they were."""
    if not all(_is_as_it_was(name) for name in _SIGNATURES):
        _logger.info("Dynamo's captures on disk are left as torch %s has them", torch.__version__)
        return False
    for module in (output_graph, symbolic_convert):
        _replace(module, "unique_id", _unlike_others)
    guards.GuardsStatePickler = Pickler  # type: ignore[misc]
    _replace(guards, "pickle_guards_state", with_functions)
    _replace(guards.CheckFunctionManager, "serialize_guards", left_out)
    _replace(package.CompilePackage, "initialize", _initialized)
    _replace(package.CompilePackage, "install", _installed)
    _replace(package.CompilePackage, "add_guarded_code", _with_its_globals)
    _replace(package.CompilePackage, "uninstall", _uninstalled)
    _replace(package, "load_guard_manager", as_they_read)
    return True


def _is_as_it_was(name: str) -> bool:
    found: Any
    found, parameters = _SIGNATURES[name]
    for part in name.split("."):
        found = getattr(found, part, None)
    return callable(found) and tuple(inspect.signature(found).parameters) == parameters


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts what is made of a function in its place; while `caching_precompile` is off the function itself is called."""
    torchs = getattr(owner, name)
    mended = make(torchs)

    @wraps(torchs)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (mended if config.caching_precompile else torchs)(*args, **kwargs)

    setattr(owner, name, chosen)


def _unlike_others(torchs: Callable[..., str]) -> Callable[..., str]:
    """Names of globals that no other process gives."""

    def unique_id(name: str, with_uuid: bool = False) -> str:
        return torchs(name, with_uuid=True)

    return unique_id


def _initialized(torchs: Callable[..., None]) -> Callable[..., None]:
    """The function that is compiled has the module of its globals."""

    def initialize(self: Any, fn: Any, dynamo: Any = None, ignore_inlined_sources: bool = False) -> None:
        with _refusing(self):
            torchs(self, fn, dynamo, ignore_inlined_sources)
        module = module_of(self._innermost_fn)
        if dynamo is None and module is not None:
            self._codes[self._innermost_fn.__code__].python_module = module.__name__

    return initialize


def _installed(torchs: Callable[..., None]) -> Callable[..., None]:
    def install(self: Any, backends: Any) -> None:
        with _refusing(self), no_collection():
            torchs(self, backends)

    return install


@contextmanager
def _refusing(entry: Any) -> Iterator[None]:
    """What cannot be loaded is as if it were not there: the one error that torch catches, with nothing left of it."""
    fresh = not entry._initialized
    try:
        yield
    except Exception as error:  # of what an entry imports, or of its pickles
        if entry._innermost_fn is not None and not fresh:
            entry.uninstall()
            for saved in filter(lambda saved: saved.code_source, entry._codes.values()):
                with suppress(AttributeError, LookupError, PackageError):  # the code is not there, nor anything on it
                    _reset_precompile_entries(package._lookup_code(saved))
        entry._initialized, entry._codes = False, {}
        raise RuntimeError(f"what was saved is captured anew: {type(error).__name__}: {error}") from error


def _uninstalled(torchs: Callable[..., None]) -> Callable[..., None]:
    """A wrapper's code is that of all functions that it wraps: what was loaded of others is left where it is."""

    def uninstall(self: Any) -> None:
        shared = self._innermost_fn.__code__.co_qualname != self._innermost_fn.__qualname__
        if self._installed_globals or not shared:
            torchs(self)

    return uninstall


def _with_its_globals(torchs: Callable[..., None]) -> Callable[..., None]:
    """Modules that bytecode loads are imported with it. With another object it is not saved: nothing would make that again."""

    def add_guarded_code(self: Any, guards_state: bytes, dynamo_code: CodeType) -> None:
        entry = self._current_entry
        names = set(_names(dynamo_code))
        made_again = {*entry.import_sources, *entry.backend_ids, *_functions(self)}
        for hook in CleanupManager.instance[dynamo_code]:
            if hook.name not in names - made_again:
                continue
            value = hook.scope[hook.name]
            if inspect.ismodule(value) and sys.modules.get(value.__name__) is value:
                entry.import_sources[hook.name] = value.__name__
            elif not hook.name.startswith(_MADE_AGAIN):
                _logger.warning("Dynamo's capture of %s is not saved: it holds %s", dynamo_code.co_name, hook.name)
                self.bypass_current_entry()
        torchs(self, guards_state, dynamo_code)

    return add_guarded_code


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def _functions(saved: Any) -> Iterator[str]:
    return (name for entry in saved._codes.values() if entry.install_to_global for name in entry.function_names)
