"""What a capture may read of an object, as a digest: two objects of one digest are captured alike.

Read are classes by name, attributes, contents of containers, code of functions with what they close over, and of tensors all
but their elements, which are inputs of a graph. The code of classes and of what functions call is that of modules, which
`dynaxla/aot_cache/module_fingerprint.py` reads.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from dynaxla.targets.registry import mesh_devices
from dynaxla.torch_api.storages import storage_key
from dynaxla.types import DEVICE_TYPE

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...))
_OF_TORCH = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, MappingProxyType)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_NAMED = (BuiltinFunctionType, MethodWrapperType, WrapperDescriptorType, type, ModuleType, logging.Logger)
_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__")


class NoFingerprint(Exception):
    """An object has a state that Python does not show; the text says where it is and of which class."""


def fingerprint(value: object, *, unread: Collection[str] = ()) -> str:
    """SHA-256 of all that a capture may read of an object, in hexadecimal digits.

    Args:
        unread: names of attributes that it does not read, whatever has them.

    Raises:
        Unknown: something in it cannot be read.
    """
    reader = _Reader(frozenset(unread))
    try:
        reader.see(value, "it")
    except RecursionError as error:
        raise NoFingerprint("it goes on without an end") from error
    return reader.digest.hexdigest()


def code_parts(code: CodeType) -> list[object]:
    """What a function does, wherever it stands, but for its constants."""
    places = (code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return [code.co_code, code.co_names, *places, *counts, code.co_exceptiontable]


class _Reader:
    def __init__(self, unread: frozenset[str]) -> None:
        self.digest = hashlib.sha256()
        self._unread = unread
        self._seen: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._held: list[object] = []  # so that no other object gets the place, and the id, of one that was seen

    def see(self, value: Any, where: str) -> None:  # noqa: C901 - a line for each kind
        kind = type(value)
        if kind in _PLAIN or kind in _OF_TORCH:
            return self._tell(kind.__name__, repr(value))
        if isinstance(value, Enum):
            return self._tell("enum", _name(kind), str(value.name), str(value.value))
        if id(value) in self._seen:
            return self._tell("again", str(self._seen[id(value)]))
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        if isinstance(value, _NAMED):
            self._tell("named", _name(value))
            bound = getattr(value, "__self__", None)  # of a method in C
            return None if isinstance(bound, _NAMED) else self.see(bound, f"the object of {where}")
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        self._tell(_name(kind))
        match value:
            case CodeType():
                self._each((*code_parts(value), *value.co_consts), where)
            case FunctionType():
                self._function(value, where)
            case MethodType():
                self._each((value.__func__, value.__self__), where)
            case functools.partial():
                self._each((value.func, value.args, value.keywords), where)
            case _ if kind in _SEQUENCES or (isinstance(value, tuple) and not hasattr(value, "__dict__")):
                self._each(value, where)
            case set() | frozenset():
                self._set(value, where)
            case _ if kind in _MAPPINGS:
                self._mapping(value, where)
            case _:
                self._object(value, where)

    def _tell(self, *texts: str) -> None:
        for text in texts:
            content = text.encode(errors="surrogatepass")
            self.digest.update(len(content).to_bytes(8, "big") + content)

    def _each(self, values: Iterable[Any], where: str) -> None:
        values = list(values)
        self._tell(str(len(values)))
        for i, value in enumerate(values):
            self.see(value, f"{where}[{i}]")

    def _mapping(self, mapping: Mapping[Any, Any], where: str) -> None:
        """Adds a mapping in its iteration order, which is part of what it means to code that loops over it."""
        self._tell(str(len(mapping)))
        for name, value in mapping.items():
            self.see(name, f"a key of {where}")
            self.see(value, f"{where}[{name!r}]")

    def _set(self, values: set[Any] | frozenset[Any], where: str) -> None:
        """In one order, as that of texts is another one in each process."""
        digests = []
        for value in values:
            reader = _Reader(self._unread)
            reader.see(value, f"an element of {where}")
            digests.append(reader.digest.hexdigest())
        self._tell(str(len(digests)), *sorted(digests))

    def _function(self, function: FunctionType, where: str) -> None:
        self._tell(_name(function))
        self._each((function.__code__, function.__defaults__, function.__kwdefaults__), where)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.see(cell.cell_contents, f"{name} of {where}")
            except ValueError:  # nothing is in it yet
                self._tell("empty")

    def _tensor(self, tensor: Tensor, where: str) -> None:
        kind = type(tensor)
        facts = (tensor.shape, tensor.dtype, tensor.device.type, tensor.layout, tensor.requires_grad)
        self._tell(_name(kind), *map(str, facts))
        if kind not in _TENSORS:
            if not hasattr(tensor, "__tensor_flatten__"):
                raise NoFingerprint(f"{where} is of {_name(kind)}")
            names, context = tensor.__tensor_flatten__()
            self._each((context, *(getattr(tensor, name) for name in names)), where)
        elif tensor.layout is torch.strided:
            storage = storage_key(tensor.untyped_storage())
            number = self._storages.setdefault(storage, len(self._storages))
            self._tell(str(tensor.stride()), str(tensor.storage_offset()), str(number), self._sharding(tensor))
        self._attributes(tensor, where)

    def _sharding(self, tensor: Tensor) -> str:
        devices = mesh_devices() if tensor.device.type == DEVICE_TYPE else None
        return "" if devices is None or not devices.in_use else str(devices.find_sharding(tensor))

    def _object(self, value: Any, where: str) -> None:
        """Its attributes; of a class that says itself how it is pickled, as its state may be elsewhere, that too."""
        kind = type(value)
        if isinstance(value, nn.Module):
            return self._attributes(value, where)
        try:
            reduced = value.__reduce_ex__(2)
        except Exception as error:  # of a class without a state that could be shown, or of the user's
            raise NoFingerprint(f"{where} is of {_name(kind)}") from error
        if all(getattr(kind, name) is getattr(object, name) for name in _PICKLING):
            reduced = reduced[3:]  # elements of lists and mappings
        parts = (reduced,) if isinstance(reduced, str) else reduced
        self._each((list(part) if isinstance(part, Iterator) else part for part in parts), where)
        self._attributes(value, where)

    def _attributes(self, value: Any, where: str) -> None:
        named = {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in self._unread}
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    named[name] = getattr(value, name)
        self._tell(str(len(named)))
        for name, attribute in named.items():
            self._tell(str(name))
            self.see(attribute, f"{where}.{name}")


def _name(value: Any) -> str:
    """As it is imported: "torch.nn.modules.linear.Linear"."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or getattr(value, "name", "")
    return f"{getattr(value, '__module__', None)}.{name}"
