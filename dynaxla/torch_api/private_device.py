"""A torch device implemented in Python: its registration, tensors without memory in torch, and helpers for its kernels.

Relies on the key PrivateUse1, for which a process has one device type, and on torch's experimental
`torch.utils.backend_registration._setup_privateuseone_for_python_backend`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import DLDeviceType

from dynaxla.torch_api.backward_passes import guard
from dynaxla.torch_api.overloads import OpOverload, aten_ops
from dynaxla.torch_api.pytree import tree_leaves

_ATTRIBUTE = "_dynaxla_memory"
_KEY = "PrivateUse1"
_AUTOCAST_KEY = "AutocastPrivateUse1"
_create = torch._C._acc.create_empty_tensor
_storage = torch._C._construct_storage_from_data_pointer


class _TorchKernel(partial[Any]):
    """A kernel of torch's own, which runs no Python code."""


def _kernel(op: OpOverload, key: DispatchKey) -> _TorchKernel:
    """Returns torch's kernel of an op for a dispatch key. Calls skip the checks of the arguments' devices and Python dispatch.

    Relies on `redispatch_boxed` of an overload's handle, `OpOverload._handle`.
    """
    return _TorchKernel(op._handle.redispatch_boxed, torch._C.DispatchKeySet(key))


_cpu_set = _kernel(torch.ops.aten.set_.source_Storage_storage_offset, DispatchKey.CPU)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


def get_registered_device_type() -> str | None:
    """Returns the name of the process's PrivateUse1 device type, which may be another package's; None if none is registered.

    Relies on `torch._C._get_privateuse1_backend_name`.
    """
    name = torch._C._get_privateuse1_backend_name()
    return None if name == "privateuseone" else name


def register_device_type(name: str, module: Any) -> None:
    """Registers the device type `name`, with its module as `torch.<name>`. Once per process.

    torch's Python hooks support one device of the type, number 0.
    """
    _setup_privateuseone_for_python_backend(name, module, _Hooks(), guard())


def tensor_at(
    address: int, dtype: torch.dtype, nbytes: int, sizes: tuple[int, ...], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """Makes a tensor of the device with a storage of its own, without memory in torch.

    Relies on `torch._C._acc.create_empty_tensor`, on `torch._C._construct_storage_from_data_pointer`, on `_swap_data_ptr_` of
    storages, which swaps their implementations, and on the CPU's kernel of `set_`, which accesses no memory if the storage is
    large enough, and which takes most of the time of this function.

    Args:
        address: unique identifier of the storage; it points to no memory.
        nbytes: size of the storage.
        strides: None for a row-major tensor with at least one element; for empty tensors torch's function
            chooses other strides.
    """
    storage = _storage(address, _device(), nbytes)
    if strides is not None:
        return _cpu_set(_create((), dtype), storage, 0, sizes, strides)  # type: ignore[no-any-return]
    made: torch.Tensor = _create(sizes, dtype)
    made.untyped_storage()._swap_data_ptr_(storage)  # type: ignore[attr-defined]
    return made


@cache
def _device() -> torch.device:
    return torch.device(torch._C._get_privateuse1_backend_name(), 0)


def copy_view_metadata(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives a tensor the storage, sizes, strides and offset of another one."""
    set_view_metadata(tensor, other.untyped_storage(), other.shape, other.stride(), int(other.storage_offset()))


def set_view_metadata(
    tensor: torch.Tensor, storage: torch.UntypedStorage, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> None:
    """Gives a tensor a storage, which is large enough, and sizes, strides and an offset in it.

    Relies on the CPU's kernel of `set_`, which accesses no memory if the storage is large enough.
    """
    _cpu_set(tensor, storage, offset, sizes, strides)


def get_attached_memory(storage: torch.UntypedStorage) -> Any:
    """Returns the object that `attach_memory` attached to a storage, or None."""
    return getattr(storage, _ATTRIBUTE, None)


def attach_memory(storage: torch.UntypedStorage, memory: object) -> None:
    """Attaches an object to a storage for the storage's lifetime, whoever references it: autograd's saved tensors too.

    Relies on storages preserving their Python object, with its attributes.
    """
    setattr(storage, _ATTRIBUTE, memory)


def get_meta_kernel(op: OpOverload) -> Callable[..., torch.Tensor]:
    """Returns torch's kernel of a view op, which reads no memory and so works for every device.

    Relies on the kernels for the key Meta.
    """
    return _kernel(op, DispatchKey.Meta)


def get_composite_kernel(op: OpOverload) -> Callable[..., torch.Tensor]:
    """Returns torch's kernel of a composite op, which calls other ops and so works for every device.

    Relies on the kernels for CompositeExplicitAutograd.
    """
    return _kernel(op, DispatchKey.CompositeExplicitAutograd)


class Kernels:
    """The kernels of the device, registered for the lifetime of this object.

    They are hidden from Dynamo, which otherwise traces every Python function that runs between two graphs.

    Relies on `torch.library` and on the names of torch's dispatch keys.
    """

    def __init__(self) -> None:
        self._ops = torch.library.Library("aten", "IMPL")
        self._own = torch.library.Library("dynaxla", "IMPL")
        self._rest = torch.library.Library("_", "IMPL")

    def add(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """Registers the kernel of one op."""
        self._ops.impl(op, _hide_from_dynamo(kernel), _KEY)

    def add_own(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """Registers the kernel of one of the package's operators."""
        self._own.impl(op, _hide_from_dynamo(kernel), _KEY)

    def add_composite(self, op: OpOverload, kernel: Callable[..., Any], differentiable: Callable[..., Any]) -> None:
        """Registers the kernels of an op that torch takes apart before autograd: one of results alone, and one made of
        differentiable ops for calls that need a gradient, and for those that are traced.

        Relies on `torch._C._len_torch_dispatch_stack`: the modes that see ops, as those of a trace do.
        """
        self.add(op, kernel)
        below = _kernel(op, DispatchKey.PrivateUse1)

        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            needed = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors)
            plain = all(type(leaf) in (torch.Tensor, torch.nn.Parameter) for leaf in tensors)
            apart = needed or not plain or torch._C._len_torch_dispatch_stack()
            return (differentiable if apart else below)(*args, **kwargs)

        self._ops.impl(op, _hide_from_dynamo(run), f"Autograd{_KEY}")

    def add_lazy(self, op: OpOverload) -> None:
        """Has an op's kernel receive tensors with a lazy conjugate or negative bit as they are.

        Else torch passes resolved copies of them, even of a tensor that the op writes to if its schema does not say so.
        """
        for key in ("Conjugate", "Negative"):
            self._ops.impl(op, torch.library.fallthrough_kernel, key)

    def add_for_host(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """Registers the kernel of one op for CPU tensors."""
        self._ops.impl(op, torch.compiler.disable(kernel), "CPU")

    def add_sizes(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """Registers an op's meta kernel, which computes result sizes for Dynamo and AOTAutograd; replaces torch's, if
        any.

        Relies on `torch._meta_registrations`, whose import registers torch's; on `OpOverload.py_kernels`, which
        Dynamo's traces use; and on `Library.impl` accepting `allow_override`, which covers all other calls.
        """
        importlib.import_module("torch._meta_registrations")
        op.py_kernels.pop(DispatchKey.Meta, None)
        op.py_impl(DispatchKey.Meta)(kernel)
        self._ops.impl(op, kernel, "Meta", allow_override=True)

    def add_autocast(self, op: OpOverload, kernel: Callable[..., Any]) -> None:
        """Registers an op's kernel under autocast."""
        self._ops.impl(op, _hide_from_dynamo(kernel), _AUTOCAST_KEY)

    def end_autocast(self) -> None:
        """Has autocast not affect any other op."""
        self._rest.fallback(torch.library.fallthrough_kernel, _AUTOCAST_KEY)

    def add_rest(self, kernel: Callable[..., Any]) -> None:
        """Registers the kernel of all other ops, of any package; its first argument is the op."""
        self._rest.fallback(torch.compiler.disable(kernel), _KEY)

    def add_sparse(self, kernel: Callable[..., Any], of_parts: Mapping[str, Sequence[OpOverload]]) -> None:
        """The kernel of every op on sparse tensors of the device, which takes the op in front of its arguments.

        Relies on the keys of the two kinds of sparse tensors, and on torch's kernels for the CPU of ops that only make or
        name a tensor's parts: the parts may be of any device. What else the CPU has kernels for is registered op by op, as
        torch has ways of its own for some, which fail.

        Args:
            of_parts: such ops, by "Sparse" (COO) and "SparseCsr" (compressed).
        """
        hidden = torch.compiler.disable(kernel)
        for kind, ops in of_parts.items():
            own = getattr(DispatchKey, f"{kind}CPU")
            for op in aten_ops().values():
                if op in ops:
                    self._ops.impl(op, _kernel(op, own), f"{kind}{_KEY}")
                elif torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), own):
                    self._ops.impl(op, partial(hidden, op), f"{kind}{_KEY}")
            self._rest.fallback(hidden, f"{kind}{_KEY}")

    def add_rest_of_other_layouts(self, kernel: Callable[..., Any]) -> None:
        """The kernel of every op on quantized and strided nested tensors of the device, which takes the op in front of its
        arguments.

        What asks a nested tensor for its sizes has the host's kernel: torch asks where an error would end the process.

        Relies on the keys of their kinds.
        """
        for name in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"):
            op = getattr(torch.ops.aten, name).default
            self._ops.impl(op, _kernel(op, DispatchKey.NestedTensorCPU), f"NestedTensor{_KEY}")
        for kind in ("Quantized", "NestedTensor"):
            self._rest.fallback(torch.compiler.disable(kernel), f"{kind}{_KEY}")


def _hide_from_dynamo(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Hides a kernel from Dynamo, except torch's own: hiding costs more time than they take."""
    return kernel if isinstance(kernel, _TorchKernel) else torch.compiler.disable(kernel)


def give_storages(resize: Callable[[Any, int], int]) -> None:
    """Has `torch.UntypedStorage(bytes, device=...)` create storages of the device, for clone, deepcopy and torch.load, and
    `storage.resize_` change their sizes, for all tensors of the storage. A slice of a storage cannot be resized, as on the CPU.

    torch does both with a device's allocator, which only C++ can register.

    Relies on `_swap_data_ptr_` of storages, which exchanges what they refer to, sizes included.

    Args:
        resize: gives what `attach_memory` attached another size in bytes; returns the new address.
    """
    made, own_resize = torch._C.StorageBase.__new__, torch.UntypedStorage.resize_

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != get_registered_device_type():
            return made(cls, *args, **kwargs)
        size = args[0] if args else kwargs.get("size", 0)
        if isinstance(size, Sequence):  # of bytes
            return torch.tensor(size, dtype=torch.uint8, device=device).untyped_storage()
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != get_registered_device_type():
            return own_resize(self, size)  # type: ignore[no-any-return]
        if size != self.nbytes():
            memory = get_attached_memory(self)
            if memory is None:
                raise RuntimeError("Trying to resize storage that is not resizable")
            address = resize(memory, size)
            for nbytes in (0, size):  # one of two storages that are exchanged has to be empty
                self._swap_data_ptr_(_storage(address, _device(), nbytes))  # type: ignore[attr-defined]
        return self

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]


def answer_for_accelerator(module: Any) -> None:
    """Has `torch.accelerator` call a module's functions where torch's Python hooks have no answer.

    Relies on the names of these functions, which take a device or nothing. torch's own stream reads the module's events, which
    are Python's, as if they were C++'s.
    """
    own_stream = torch.accelerator.current_stream

    def current_stream(device: Any = None, /) -> Any:
        own_stream(device)  # which refuses other devices
        return module.current_stream(device)

    torch.accelerator.current_stream = current_stream
    for name in ("synchronize", "memory_allocated", "max_memory_allocated", "memory_stats", "empty_cache"):
        setattr(torch.accelerator, name, getattr(module, name))
        if hasattr(torch.accelerator.memory, name):
            setattr(torch.accelerator.memory, name, getattr(module, name))


def exchange_by_dlpack(adopt: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Has `torch.from_dlpack` and `Tensor.__dlpack__` take tensors of the device: torch knows only the name "privateuse1".

    Other consumers get a copy on the host if they ask for the device (kDLCPU, 0), as numpy does for `device="cpu"`.

    Relies on `torch._C._from_dlpack`, which torch's functions for DLPack but `asarray` call, and which makes a storage at the
    address of the exported tensor; on `DLDeviceType.kDLExtDev` being PrivateUse1; and on `_device_constructors`, which keeps
    torch's own `asarray`, so that `with torch.device(...)` gives it a device.

    Args:
        adopt: makes a tensor with such a storage one of the device.
    """
    own_import, own_export, own_device = torch._C._from_dlpack, torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__
    own_asarray, host = torch.asarray, (DLDeviceType.kDLCPU, 0)
    torch.utils._device._device_constructors()

    def from_dlpack(capsule: Any) -> torch.Tensor:
        made = own_import(capsule)
        return adopt(made) if made.device.type == get_registered_device_type() else made

    @wraps(own_asarray)
    def asarray(obj: Any, **options: Any) -> torch.Tensor:
        return own_asarray(from_dlpack(obj) if type(obj).__name__ == "PyCapsule" else obj, **options)

    def __dlpack_device__(self: torch.Tensor) -> Any:
        if self.device.type != get_registered_device_type():
            return own_device(self)
        return (DLDeviceType.kDLExtDev, 0)

    def __dlpack__(self: torch.Tensor, *, copy: bool | None = None, dl_device: Any = None, **kwargs: Any) -> Any:
        if self.device.type != get_registered_device_type() or dl_device is None or tuple(dl_device) != host:
            return own_export(self, copy=copy, dl_device=dl_device, **kwargs)
        if copy is False:
            raise BufferError(f"a tensor of {self.device.type} reaches the CPU by a copy alone")
        return own_export(self.cpu(), **{**kwargs, "stream": None})

    torch._C._from_dlpack = from_dlpack  # type: ignore[assignment]
    torch.asarray = asarray  # type: ignore[assignment]
    torch.Tensor.__dlpack__ = __dlpack__  # type: ignore[method-assign, assignment]
    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]


def set_printer(moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Has torch print a tensor of the device as `moved(tensor)`; for a few devices torch itself copies to the CPU to print.

    Relies on `torch._tensor_str._tensor_str`, which formats the elements, and which torch looks up by that name.
    """
    written = torch._tensor_str._tensor_str

    def write(tensor: torch.Tensor, indent: int) -> str:
        return written(moved(tensor) if tensor.device.type == get_registered_device_type() else tensor, indent)  # type: ignore[no-any-return]

    torch._tensor_str._tensor_str = torch.compiler.disable(write)


@contextmanager
def trace_as_captured() -> Iterator[None]:
    """Context in which ops are traced as AOTAutograd traces them: without autograd, autocast, and the user's default device.

    Also silences the log of fake tensors about calls that they refuse: such a call is the user's error, which eager
    raises in its own words.

    Relies on `torch._C._DisableAutocast`, `torch._C.DisableTorchFunction` and on the logger of
    torch._subclasses.fake_tensor.
    """
    fake_logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, fake_logger.disabled = fake_logger.disabled, True
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            yield
    finally:
        fake_logger.disabled = was
