"""What modules are made of in this process, as digests: their functions, those of their classes, and values: plain ones,
containers of these, objects of the module's own package.

It is the code that would run now, not that of the files: a function that was put in the place of another one is seen. Of
modules in a module the values are read, as `settings.scale` may be. Of other objects the class is read alone: many remember
what was done with them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from dynaxla.aot_cache.object_fingerprint import NoFingerprint, code_parts, fingerprint

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_VERSIONED = frozenset({*sys.stdlib_module_names, "torch", "jax", "numpy", "transformers", "dynaxla"})
"""Packages of which nothing is read where another module names theirs: keys have their versions."""


def fingerprint_modules(names: Iterable[str]) -> dict[str, str]:
    """By module, SHA-256 of its namespace in hexadecimal digits; "" where it is not imported."""
    return {name: _digest_of(name) for name in sorted(set(names))}


def _digest_of(name: str) -> str:
    module = sys.modules.get(name)
    if module is None:
        return ""
    digest = hashlib.sha256()
    own = {
        each: value for each, value in vars(module).items() if not each.startswith("__")
    }  # Dynamo puts such names there
    for text in _namespace(own, name, {id(module)}):
        digest.update(f"{len(text)}:".encode() + text.encode(errors="surrogatepass"))
    return digest.hexdigest()


def _namespace(held: Mapping[str, Any], module: str, seen: set[int]) -> Iterator[str]:
    for name in sorted(held):
        if not name.startswith("__") or _function_of(held[name]) is not None:  # others come and go, as `__slotnames__`
            yield name
            yield from _told(held[name], module, seen)


def _told(value: Any, module: str, seen: set[int]) -> Iterator[str]:
    """What of a value Python's code would run, or compute with; of all else the class."""
    function = _function_of(value)
    if type(value) in _PLAIN:
        yield repr(value)
    elif id(value) in seen:
        yield "again"
    elif function is not None:
        seen.add(id(value))
        yield from _of_function(function, module, seen)
    elif isinstance(value, type):
        seen.add(id(value))
        yield f"{value.__module__}.{value.__qualname__}"
        if value.__module__ == module:
            yield from _namespace(vars(value), module, seen)
    elif isinstance(value, Mapping):
        seen.add(id(value))
        named = {key: each for key, each in value.items() if isinstance(key, str) and _function_of(each) is not None}
        yield from _namespace(named, module, seen)
        yield from _values_of({repr(key): each for key, each in value.items() if _is_plain(key)})
    elif isinstance(value, ModuleType) and _package(value.__name__) not in _VERSIONED:
        yield from _values_of(vars(value))
    elif _package(type(value).__module__) == _package(module) != "torch" or _is_plain(value):  # settings, say
        yield _identity_of(value)
    else:
        yield type(value).__qualname__


def _values_of(held: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(held):
        if not name.startswith("__") and _is_plain(held[name]):
            yield name
            yield _identity_of(held[name])


def _is_plain(value: Any) -> bool:
    """A plain value, or one of torch's that names a choice, or a container of these."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, (Enum, torch.dtype, torch.device))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _identity_of(value: Any) -> str:
    try:
        return fingerprint(value)
    except NoFingerprint:
        return type(value).__qualname__


def _function_of(value: Any) -> FunctionType | None:
    """A function, also where it stands in a method, a property, a cache or a wrapper."""
    for name in ("__func__", "fget", "func", "__wrapped__") if not isinstance(value, FunctionType | type) else ():
        inner = getattr(value, name, None) if isinstance(value, _HOLDERS) or name == "__wrapped__" else None
        if isinstance(inner, FunctionType):
            return inner
    return value if isinstance(value, FunctionType) else None


_HOLDERS = (staticmethod, classmethod, MethodType, property)


def _of_function(function: FunctionType, module: str, seen: set[int]) -> Iterator[str]:
    yield f"{function.__module__}.{function.__qualname__}"
    yield from _of_code(function.__code__)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _told(value, module, seen)
    for cell in function.__closure__ or ():
        try:
            yield from _told(cell.cell_contents, module, seen)
        except ValueError:  # nothing is in it yet
            yield "empty"


def _of_code(code: CodeType) -> Iterator[str]:
    yield repr(code_parts(code))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(constant, key=repr))
        else:
            yield repr(constant)
