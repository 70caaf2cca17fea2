"""A device of torch's in Python: its registration, tensors without memory of torch's own, and what kernels of it need.

Relies on the key PrivateUse1, of which a process has one device type, and on torch's experimental
`torch.utils.backend_registration._setup_privateuseone_for_python_backend`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dynaxla.torch_api.backward_passes import Guard
from dynaxla.torch_api.overloads import OpOverload

_ATTRIBUTE = "_dynaxla_memory"
_KEY = "PrivateUse1"
_AUTOCAST_KEY = "AutocastPrivateUse1"
_create = torch._C._acc.create_empty_tensor
_storage = torch._C._construct_storage_from_data_pointer


def _kernel(op: OpOverload, key: DispatchKey) -> Callable[..., Any]:
    """The kernel that torch has of an op for a key, called without looking at the arguments' devices, nor by way of Python.

    Relies on `redispatch_boxed` of the handle that an overload has, `OpOverload._handle`.
    """
    return partial(op._handle.redispatch_boxed, torch._C.DispatchKeySet(key))


_set_of_cpu = _kernel(torch.ops.aten.set_.source_Storage_storage_offset, DispatchKey.CPU)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


def taken_name() -> str | None:
    """The name of the device type that the process has, of another package; None if there is none.

    Relies on `torch._C._get_privateuse1_backend_name`.
    """
    name = torch._C._get_privateuse1_backend_name()
    return None if name == "privateuseone" else name


def register_device_type(name: str, module: Any) -> None:
    """Makes `torch.device(name)` one, and `torch.<name>` the module. Once per process.

    torch's Python hooks know one device of the type, number 0.
    """
    _setup_privateuseone_for_python_backend(name, module, _Hooks(), Guard())


def tensor_at(
    address: int, dtype: torch.dtype, nbytes: int, sizes: tuple[int, ...], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor of the device with a storage of its own, whose memory is no memory of torch's.

    Relies on `torch._C._acc.create_empty_tensor`, on `torch._C._construct_storage_from_data_pointer`, on `_swap_data_ptr_` of
    storages, which exchanges all that two of them are, and on the CPU's kernel of `set_`, which touches no memory where the
    storage is large enough, and which takes longer than everything else here.

    Args:
        address: tells storages from one another; nothing lies there.
        nbytes: of the storage.
        strides: None: those of a row-major tensor, which has elements: torch's function has strides of its own for others.
    """
    storage = _storage(address, _device(), nbytes)
    if strides is not None:
        return _set_of_cpu(_create((), dtype), storage, 0, sizes, strides)  # type: ignore[no-any-return]
    made: torch.Tensor = _create(sizes, dtype)
    made.untyped_storage()._swap_data_ptr_(storage)  # type: ignore[attr-defined]
    return made


@cache
def _device() -> torch.device:
    return torch.device(torch._C._get_privateuse1_backend_name(), 0)


def place_as(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Has a tensor lie as another one does, in its storage."""
    lay(tensor, other.untyped_storage(), other.shape, other.stride(), int(other.storage_offset()))


def lay(
    tensor: torch.Tensor, storage: torch.UntypedStorage, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> None:
    """Has a tensor lie so in a storage from now on, which is large enough.

    Relies on the CPU's kernel of `set_`, which touches no memory where the storage is large enough.
    """
    _set_of_cpu(tensor, storage, offset, sizes, strides)


def memory_in(storage: torch.UntypedStorage) -> Any:
    """What `keep_memory` gave to a storage, or None."""
    return getattr(storage, _ATTRIBUTE, None)


def keep_memory(storage: torch.UntypedStorage, memory: object) -> None:
    """Has a storage hold a thing as long as it lives, whoever holds the storage: autograd's saved tensors among them.

    Relies on storages keeping their Python object, with its attributes.
    """
    setattr(storage, _ATTRIBUTE, memory)


def kernel_of_views(op: OpOverload) -> Callable[..., torch.Tensor]:
    """torch's own kernel of an op that gives a view, which reads no memory: it serves for every device.

    Relies on the kernels for the key Meta.
    """
    return _kernel(op, DispatchKey.Meta)


def kernel_of_parts(op: OpOverload) -> Callable[..., torch.Tensor]:
    """torch's own kernel of an op, which is made of other ops and serves for every device.

    Relies on the kernels for CompositeExplicitAutograd.
    """
    return _kernel(op, DispatchKey.CompositeExplicitAutograd)


class Kernels:
    """The kernels of the device, as long as this lives.

    Dynamo, which looks at every Python function that runs between two graphs, is kept from looking at them.

    Relies on `torch.library` and on the names of torch's dispatch keys.
    """

    def __init__(self) -> None:
        self._ops = torch.library.Library("aten", "IMPL")
        self._rest = torch.library.Library("_", "IMPL")

    def add(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """The kernel of one op."""
        self._ops.impl(op, _unseen(kernel), _KEY)

    def add_lazy(self, op: OpOverload) -> None:
        """Has an op see tensors that stand for conjugates or negatives of what lies in their memory, as it does in its kernel.

        Else torch gives it copies of them, also of one that it writes to and whose schema does not say so.
        """
        for key in ("Conjugate", "Negative"):
            self._ops.impl(op, torch.library.fallthrough_kernel, key)

    def add_for_host(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """The kernel of one op for tensors of the host."""
        self._ops.impl(op, torch.compiler.disable(kernel), "CPU")

    def add_sizes(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """What gives results of an op's sizes to Dynamo and AOTAutograd; in the place of what torch has, if it has something.

        Relies on `torch._meta_registrations`, whose import registers torch's; on `OpOverload.py_kernels`, which are asked while
        Dynamo traces; and on `Library.impl` taking `allow_override`, which is asked elsewhere.
        """
        importlib.import_module("torch._meta_registrations")
        op.py_kernels.pop(DispatchKey.Meta, None)
        op.py_impl(DispatchKey.Meta)(kernel)
        self._ops.impl(op, kernel, "Meta", allow_override=True)

    def add_autocast(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """What is done of an op under autocast before anything else."""
        self._ops.impl(op, kernel, _AUTOCAST_KEY)

    def end_autocast(self) -> None:
        """Autocast leaves every other op as it is."""
        self._rest.fallback(torch.library.fallthrough_kernel, _AUTOCAST_KEY)

    def add_rest(self, kernel: Callable[..., Any]) -> None:
        """The kernel of every op that has none, of any package; it takes the op in front of its arguments."""
        self._rest.fallback(torch.compiler.disable(kernel), _KEY)

    def add_rest_of_other_layouts(self, kernel: Callable[..., Any], compressed: Sequence[OpOverload]) -> None:
        """The kernel of every op on tensors of the device that are not strided, which takes the op in front of its arguments.

        What asks a nested tensor for its sizes has the host's kernel: torch asks where an error would end the process.

        Relies on the keys of their kinds.

        Args:
            compressed: ops that torch has for every device, but which have this kernel, too.
        """
        for op in compressed:
            self._ops.impl(op, torch.compiler.disable(partial(kernel, op)), f"SparseCsr{_KEY}")
        for name in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"):
            op = getattr(torch.ops.aten, name).default
            self._ops.impl(op, _kernel(op, DispatchKey.NestedTensorCPU), f"NestedTensor{_KEY}")
        for kind in ("Sparse", "SparseCsr", "Quantized", "NestedTensor"):
            self._rest.fallback(torch.compiler.disable(kernel), f"{kind}{_KEY}")


def _unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that Dynamo does not look into; torch's own run no Python of their own, and a guard costs more than they do."""
    return kernel if isinstance(kernel, partial) else torch.compiler.disable(kernel)


def give_storages() -> None:
    """Has `torch.UntypedStorage(bytes, device=...)` make storages of the device, as clone, deepcopy and torch.load want.

    torch makes storages by a device's allocator, which only C++ can register.
    """
    made = torch._C.StorageBase.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != taken_name():
            return made(cls, *args, **kwargs)
        nbytes = args[0] if args else kwargs.get("size", 0)
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign, assignment]


def answer_for_accelerator(module: Any) -> None:
    """Has `torch.accelerator` ask a module what torch's Python hooks cannot answer.

    Relies on the names of its functions, which take a device or nothing.
    """
    for name in ("synchronize", "memory_allocated", "max_memory_allocated", "memory_stats", "empty_cache"):
        setattr(torch.accelerator, name, getattr(module, name))
        if hasattr(torch.accelerator.memory, name):
            setattr(torch.accelerator.memory, name, getattr(module, name))


def print_by(moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Has tensors of the device printed of what `moved` makes of them, as torch prints those of a few devices.

    Relies on `torch._tensor_str._tensor_str`, which writes the elements, and which torch finds by that name.
    """
    written = torch._tensor_str._tensor_str

    def write(tensor: torch.Tensor, indent: int) -> str:
        return written(moved(tensor) if tensor.device.type == taken_name() else tensor, indent)  # type: ignore[no-any-return]

    torch._tensor_str._tensor_str = write


@contextmanager
def as_captured() -> Iterator[None]:
    """Within it ops are traced as AOTAutograd traces them: without autograd, autocast, and the user's default device.

    What fake tensors log of calls that they refuse is the user's error, which eager raises in its own words.

    Relies on `torch._C._DisableAutocast`, `torch._C.DisableTorchFunction` and on the logger of torch._subclasses.fake_tensor.
    """
    told = logging.getLogger("torch._subclasses.fake_tensor")
    was, told.disabled = told.disabled, True
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            yield
    finally:
        told.disabled = was


def aten_ops() -> Mapping[str, OpOverload]:
    """Every overload of ATen, by its name. Relies on `torch._C._dispatch_get_all_op_names`."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == "aten":
            packet, _, overload = rest.partition(".")
            ops = getattr(torch.ops.aten, packet, None)
            op = getattr(ops, overload or "default", None)
            if op is not None:
                found[rest] = op
    return found
