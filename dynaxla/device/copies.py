"""Copies of tensors of the device: to the host and back, into other tensors, and to other dtypes; new tensors like them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaxla.device.cpu_fallback import CpuFallbackRunner
from dynaxla.device.dispatcher import OpDispatcher
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.op_call import locate_view, resolve_lazy_bits
from dynaxla.device.storage import DeviceStorage, DeviceStorages, find_no_sharding, find_sharding
from dynaxla.device.view_layout import memory_order
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.private_device import get_composite_kernel
from dynaxla.types import DEVICE_TYPE, TensorSpec

aten = torch.ops.aten

SMALL_BYTES = 1 << 16
"""Of a memory of this size all is copied to the host where a part is asked for: that costs less than a run that cuts it out."""

MOST_JOINED = 32
"""Tensors that one program puts together. XLA takes longer for each further operand than a program runs: some 7 ms, and 75 ms
for one that is a part of a memory."""
MOST_PARTS_JOINED = 8
"""The same where one of them is a part of a memory."""


class CopyKernels:
    """The kernels that copy."""

    def __init__(
        self, client: PjrtClient, memories: DeviceStorages, eager: OpDispatcher, host: CpuFallbackRunner
    ) -> None:
        self._client = client
        self._memories = memories
        self._eager = eager
        self._host = host
        self._find_sharding = find_no_sharding if client.mesh_devices is None else find_sharding

    def copy_from(
        self, source: torch.Tensor | complex, target: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """Copies between devices, dtypes and strides; a write that torch may make to the source afterwards is not seen.

        torch hands a plain number over as it is, also to a kernel of tensors.
        """
        if not isinstance(source, torch.Tensor):
            dtype = {float: torch.float64, complex: torch.complex128}.get(type(source))
            source = torch.tensor(source, dtype=dtype, device="cpu")
        if target.is_conj() or target.is_neg():
            return self.copy_from(*_bare(source, target))
        if source.device.type == DEVICE_TYPE and target.device.type == DEVICE_TYPE:
            self._copy_here(resolve_lazy_bits(source), target)
        elif source.device.type == DEVICE_TYPE:
            target.copy_(self.to_host(source))
        else:
            self._copy_in(source, target)
        return target

    def copy_from_and_resize(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.shape != source.shape:
            target.resize_(source.shape)
        return self.copy_from(source, target)

    def _copy_here(self, source: torch.Tensor, target: torch.Tensor) -> None:
        one, other = self._memories.of(source), self._memories.of(target)
        if one is other and have_same_layout(source, target):
            return
        torch_layout, _ = locate_view(self._eager.layouts, one.spec, source)
        if one is not other and source.dtype is target.dtype and torch_layout.is_whole:
            into, _ = locate_view(self._eager.layouts, other.spec, target)
            if have_same_layout(source, target) and into.is_whole and not one.is_empty and self._may_share(one, other):
                other.share(one)
                return
        self._eager.run(_COPY, (target, source), {})

    def _may_share(self, one: DeviceStorage, other: DeviceStorage) -> bool:
        """Whether a memory may have another one's buffer: not where it is sharded otherwise."""
        wanted = self._find_sharding(other)
        return wanted is None or self._find_sharding(one) == wanted

    def _copy_in(self, source: torch.Tensor, target: torch.Tensor) -> None:
        memory = self._memories.of(target)
        placed, _ = locate_view(self._eager.layouts, memory.spec, target)
        value = source.detach().to(target.dtype).expand(target.shape).resolve_conj().resolve_neg()
        if not placed.is_whole:
            self._eager.run(_COPY, (target, self._host.tensor(value.contiguous())), {})
            return
        self._host.fill(memory, value.permute(memory_order(target.stride())), "a copy from the host")

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values on the host; waits for the run that makes them.

        Raises:
            ExecutionError: that run failed.
            IndexError, RuntimeError: values of an earlier call were out of range, which the device found.
        """
        self._memories.check_process(self._client.platform)
        self._eager.checks.raise_failed()
        tensor = resolve_lazy_bits(tensor)
        memory = self._memories.of(tensor)
        if tensor.numel() * tensor.itemsize * 2 < memory.spec.nbytes > SMALL_BYTES:
            tensor = self._eager.run(_CONTIGUOUS, (tensor,), {"memory_format": torch.contiguous_format})
            memory = self._memories.of(tensor)
        array = self._host.read(memory)
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return made.set_(array.untyped_storage(), *place)  # type: ignore[no-any-return, call-overload]

    def row_major(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the same values whose memory is all its own."""
        return self._eager.run(_CONTIGUOUS, (resolve_lazy_bits(x),), {"memory_format": torch.contiguous_format})  # type: ignore[no-any-return]

    def item(self, tensor: torch.Tensor) -> Any:
        return self.to_host(tensor).item()

    def clone(self, x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        x = resolve_lazy_bits(x)
        memory = self._memories.of(x)
        placed, _ = locate_view(self._eager.layouts, memory.spec, x)
        keeps = memory_format in (None, torch.preserve_format) or x.is_contiguous(memory_format=memory_format)
        if memory.is_empty or not (keeps and placed.is_whole):
            return self._eager.run(_CONTIGUOUS, (x,), {"memory_format": memory_format})  # type: ignore[no-any-return]
        made = DeviceStorage(memory.spec)
        made.share(memory)
        return self._memories.tensor(made, TensorSpec.from_tensor(x), x.stride())

    def cat(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        return self._join(_CAT, tensors, dim)

    def stack(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        return self._join(_STACK, tensors, dim)

    def _join(self, known: FunctionalForm, tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Many tensors group by group, so that a few small programs serve any number of them."""
        if len(tensors) > MOST_PARTS_JOINED and not self._eager.fused.is_on and _are_alike(tensors):
            most = MOST_JOINED if all(map(self._is_whole, tensors)) else MOST_PARTS_JOINED
            while len(tensors) > most:
                groups = [tensors[i : i + most] for i in range(0, len(tensors), most)]
                tensors = [self._eager.run(known, (group, dim), {}) for group in groups]
                known, most = _CAT, MOST_JOINED
        return self._eager.run(known, (tensors, dim), {})  # type: ignore[no-any-return]

    def _is_whole(self, x: torch.Tensor) -> bool:
        return locate_view(self._eager.layouts, self._memories.of(x).spec, x)[0].is_whole

    def to_copy(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Another dtype here is one program; what crosses devices torch makes of an empty tensor and a copy into it."""
        device = options.get("device")
        if x.device.type != DEVICE_TYPE:
            return _ACROSS(x, **options)
        if device is not None and device.type != DEVICE_TYPE:
            # Such a read waits; if it need not, torch asks its C++ hooks for pinned memory.
            return _ACROSS(x, **{**options, "non_blocking": False})
        return self._eager.run(_CONVERTED, (x,), options)  # type: ignore[no-any-return]


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors can be put together in any groups: of one device, dtype and shape, and none in channels_last, which the
    result would have of all together."""
    first = tensors[0]
    return all(
        tensor.device == first.device
        and tensor.dtype is first.dtype
        and tensor.shape == first.shape
        and (tensor.dim() < 4 or tensor.is_contiguous())
        for tensor in tensors
    )


def have_same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same places in their memories, and the same dtype."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


def _bare(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target of a copy, where the target's memory holds conjugates or negatives of its elements."""
    if target.is_conj():
        source, target = source.conj(), target.conj()
    if target.is_neg():
        source, target = torch.neg(source), aten._neg_view.default(target)
    return source, target


_ACROSS = get_composite_kernel(aten._to_copy.default)
_CONVERTED = FunctionalForm.of(aten._to_copy.default)
_COPY = FunctionalForm.of(aten.copy_.default)
_CAT = FunctionalForm.of(aten.cat.default)
_STACK = FunctionalForm.of(aten.stack.default)
_CONTIGUOUS = FunctionalForm.of(aten.clone.default)


def make_where_asked(
    op: OpOverload, run: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """A new tensor like another one, on the device that is asked for: elsewhere, it is made like an empty one there."""
    where = options.get("device")
    if where is None or where.type == DEVICE_TYPE:
        return run(x, *args, **options)
    like: torch.Tensor = op(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where), *args, **options)
    return like
