"""The kernels of the device: what makes tensors, views and copies, and one for all that computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from dynaxla.custom_ops.constrain import CONSTRAIN, CONSTRAIN_LIKE, UNSHARD
from dynaxla.custom_ops.recurrence import RECURRENCE, RECURRENCE_BACKWARD
from dynaxla.decompositions.rnn_cells import RNN_CELL_DECOMPOSITIONS
from dynaxla.decompositions.rnn_layers import RNN_LAYER_DECOMPOSITIONS
from dynaxla.device.copies import CopyKernels, make_where_asked
from dynaxla.device.cpu_fallback import CpuFallbackRunner
from dynaxla.device.dispatcher import OpDispatcher
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.fused_optimizers import FUSED, give_nothing, step_at_rate
from dynaxla.device.op_call import OnlyStrided, check_index
from dynaxla.device.op_results import count_writes
from dynaxla.device.storage import DeviceStorage, DeviceStorages, find_sharding, stored_spec
from dynaxla.device.supported_ops import register_layouts
from dynaxla.device.view_layout import memory_order
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.torch_api.overloads import UNSAFE_VIEWS, OpOverload
from dynaxla.torch_api.private_device import (
    Kernels,
    copy_view_metadata,
    get_attached_memory,
    get_composite_kernel,
    get_meta_kernel,
    set_view_metadata,
)
from dynaxla.types import DEVICE_TYPE, TensorSpec, row_major_strides

aten = torch.ops.aten

VIEWS = (
    aten.view.default,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
)
"""Ops that torch's own kernels compute for any device, as they read no memory. torch makes other views of
`as_strided`."""

EMPTY = (aten.empty_like.default, aten.new_empty.default, aten.empty_permuted.default)
"""Ops that torch makes of `empty` and `empty_strided`."""


def _zeros_like(run: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of a fake tensor too, which has no memory: torch's own fallback of fake tensors asks for it."""
    is_fake = get_attached_memory(x.untyped_storage()) is None
    return (get_composite_kernel(aten.zeros_like.default) if is_fake else run)(x, **options)


class DeviceKernels:
    """The kernels, registered for as long as this lives."""

    def __init__(
        self, client: PjrtClient, memories: DeviceStorages, eager: OpDispatcher, host: CpuFallbackRunner
    ) -> None:
        self._client = client
        self._memories = memories
        self._eager = eager
        self._host = host
        self.copies = CopyKernels(client, memories, eager, host)
        self._known: dict[OpOverload, FunctionalForm] = {}
        self.kernels = Kernels()

    def register(self, computed: Sequence[OpOverload]) -> None:
        """Registers all of them.

        Args:
            computed: the ops that a program can compute, where torch has a way of its own to take them apart, too.
        """
        own = self._own()
        for op, kernel in own.items():
            self.kernels.add(op, kernel)
        for op in computed:
            if op not in own:
                self.kernels.add(op, self._kernel(op))
        # torch has no meta kernel of two cells and of most fused steps, and one of a third cell only with a bias.
        for op, function in {**RNN_CELL_DECOMPOSITIONS, **dict.fromkeys(FUSED, give_nothing)}.items():
            self.kernels.add_sizes(op, function)
        for op, function in RNN_LAYER_DECOMPOSITIONS.items():
            self.kernels.add_composite(op, self._kernel(op), function)
        for op in (RECURRENCE, RECURRENCE_BACKWARD, CONSTRAIN, CONSTRAIN_LIKE, UNSHARD):
            self.kernels.add_own(op, self._kernel(op))
        for op in (aten._copy_from.default, aten._copy_from_and_resize.default):
            self.kernels.add_lazy(op)
        self.kernels.add_rest(self._rest)
        register_layouts(self.kernels, self._eager.run_sparse)
        self.kernels.add_for_host(aten._pin_memory.default, _pin_memory)

    def _own(self) -> Mapping[OpOverload, Callable[..., Any]]:
        views = {op: get_meta_kernel(op) for op in VIEWS}
        views |= {op: get_composite_kernel(op) for op in (*UNSAFE_VIEWS, *EMPTY)}
        if self._client.mesh_devices is not None:
            views[aten.empty_like.default] = partial(self._empty_like, views[aten.empty_like.default])
        return {
            **views,
            aten.zeros_like.default: partial(_zeros_like, self._kernel(aten.zeros_like.default)),
            aten.as_strided.default: self._as_strided,
            aten.empty.memory_format: self._empty,
            aten.empty_strided.default: self._empty_strided,
            aten.new_empty_strided.default: self._new_empty_strided,
            aten._copy_from.default: self.copies.copy_from,
            aten._copy_from_and_resize.default: self.copies.copy_from_and_resize,
            aten._local_scalar_dense.default: self.copies.item,
            aten.clone.default: self.copies.clone,
            aten._to_copy.default: self.copies.to_copy,
            aten.cat.default: self.copies.cat,
            aten.stack.default: self.copies.stack,
            aten._lazy_clone.default: self.copies.clone,  # which shares the buffer until one of the two is written
            aten.resize_.default: self._resize,
            aten.set_.source_Storage: self._set_storage,
            aten.set_.source_Storage_storage_offset: self._set_storage,
            aten.set_.source_Tensor: self._set_tensor,
            aten.set_.default: self._set_nothing,
            aten._fused_sdp_choice.default: _attention_choice,
            aten._nested_tensor_from_mask_left_aligned.default: _no_nested_tensor,
            aten.equal.default: self._equal,
            aten.cholesky.default: self._cholesky,
            aten._linalg_check_errors.default: self._check_errors,
            aten.is_set_to.default: self._is_set_to,
            aten.record_stream.default: lambda tensor, stream: None,
            aten._chunk_cat.out: partial(self._chunk_cat_into, self._kernel(aten._chunk_cat.out)),
            aten._foreach_copy_.default: partial(self._copy_each, self._kernel(aten._foreach_copy_.default)),
        }

    def _kernel(self, op: OpOverload) -> Callable[..., Any]:
        known, run = FunctionalForm.of(op), self._eager.run

        def call(*args: Any, **kwargs: Any) -> Any:
            return run(known, args, kwargs)

        if known.names[:1] == ("self",) and "device" in known.names:
            return partial(make_where_asked, op, call)
        counted = partial(_counted, run, known) if known.written and known.counted == "parts" else call
        return partial(step_at_rate, counted) if op in FUSED else counted

    def _rest(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        known = self._known.get(op)
        if known is None:
            known = self._known[op] = FunctionalForm.of(op)
        return self._eager.run(known, args, kwargs)

    # Tensors

    def _empty(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        strides = None
        if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
            strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
        return self._new(size, strides, dtype, layout, device)

    def _empty_strided(self, size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
        if len(size) != len(stride):
            sizes, strides = f"sizes ({len(size)})", f"strides ({len(stride)})"
            raise RuntimeError(f"dimensionality of {sizes} must match dimensionality of {strides}")
        return self._new(size, stride, options.get("dtype"), options.get("layout"), options.get("device"))

    def _new_empty_strided(
        self, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], **options: Any
    ) -> torch.Tensor:
        merged: dict[str, Any] = {"dtype": x.dtype, "device": x.device} | options
        return torch.empty_strided(size, stride, **merged)

    def _new(
        self,
        size: Sequence[int],
        strides: Sequence[int] | None,
        dtype: torch.dtype | None,
        layout: torch.layout | None,
        device: torch.device | None,
    ) -> torch.Tensor:
        if layout not in (None, torch.strided):
            raise OnlyStrided(layout)
        check_index(device)
        self._memories.check_process(self._client.platform)
        if dtype is torch.complex32:
            torch.empty(0, dtype=dtype, device="cpu")  # torch warns of it, once
        spec = TensorSpec(tuple(size), dtype or torch.get_default_dtype())
        array = spec if strides is None else TensorSpec(_array_of(spec.shape, strides), spec.dtype)
        memory = DeviceStorage(stored_spec(array))
        if _fills_new_memory() and spec.nbytes:
            self._host.fill(memory, _new_elements(array.shape, array.dtype), "an empty tensor")
        return self._memories.tensor(memory, spec, strides)

    def _empty_like(self, make: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> torch.Tensor:
        """An empty tensor that is sharded as another one: zeros, as a memory without elements has no sharding."""
        made = make(x, **options)
        is_fake = get_attached_memory(x.untyped_storage()) is None
        if made.device.type == DEVICE_TYPE and x.device == made.device and not is_fake:
            wanted, memory = find_sharding(self._memories.of(x)), self._memories.of(made)
            if wanted is not None and memory.spec.shape == self._memories.of(x).spec.shape:
                memory.rebind(self._client.mesh_devices.put_zeros(memory.spec, wanted))
        return made

    def _as_strided(
        self, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
    ) -> torch.Tensor:
        if len(size) != len(stride):
            raise RuntimeError("mismatch in length of strides and shape")
        offset = x.storage_offset() if storage_offset is None else storage_offset
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        held = x.untyped_storage().nbytes()  # also of a subclass around another tensor, which has no memory
        if 0 not in size and (last + 1) * x.itemsize > held:
            raise RuntimeError(
                f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {x.itemsize} "
                f"requiring a storage size of {(last + 1) * x.itemsize} are out of bounds for storage of size {held}"
            )
        return _AS_STRIDED(x, size, stride, offset)

    # Storages

    def _resize(
        self, x: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
    ) -> torch.Tensor:
        """Sizes, and strides of a memory format, in the same storage; strides stay where sizes do.

        What grows takes a storage of its own, with what it had in front: torch lets only C++ change the size of one.
        """
        memory, spec, offset = self._memories.of(x), TensorSpec(tuple(size), x.dtype), int(x.storage_offset())
        storage, strides = x.untyped_storage(), x.stride() if spec.shape == x.shape else spec.strides
        if memory_format not in (None, torch.preserve_format):
            strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
        if offset * x.itemsize + spec.nbytes > storage.nbytes():
            grown = _new_elements((offset + math.prod(size),), x.dtype)
            if not memory.is_empty:
                held = self._host.read(memory).reshape(-1).view(torch.uint8)
                grown.view(torch.uint8)[: held.numel()] = held
            storage = self._host.tensor(grown).untyped_storage()
        set_view_metadata(x, storage, spec.shape, strides, offset)
        return x

    def resize_storage(self, memory: DeviceStorage, nbytes: int) -> int:
        """Gives a memory another size, with what it had in front, and returns its new address. Without bytes it holds no
        buffer; what it gets afterwards has any value."""
        if memory.is_empty or nbytes == 0:
            same = nbytes in (0, memory.spec.nbytes)  # freed for a while: it is an array of the same shape again
            memory.rebind(None, None if same else TensorSpec((nbytes,), torch.uint8), "a resized storage")
        else:
            held = self._host.read(memory).reshape(-1).view(torch.uint8)[:nbytes]
            grown = _new_elements((nbytes,), torch.uint8)
            grown[: held.numel()] = held
            self._host.fill(memory, grown, "a resized storage")
        return self._memories.place(memory, nbytes)

    def _set_storage(
        self,
        x: torch.Tensor,
        source: torch.UntypedStorage,
        storage_offset: int = 0,
        size: Sequence[int] | None = None,
        stride: Sequence[int] = (),
    ) -> torch.Tensor:
        elements = source.nbytes() // x.itemsize
        sizes = (elements,) if size is None else tuple(size)
        strides = tuple(stride) if len(stride) == len(sizes) else row_major_strides(sizes)
        set_view_metadata(x, source, sizes, strides, storage_offset)
        is_slice = get_attached_memory(source) is None
        return self._memories.adopt(x) if is_slice else x

    def _set_tensor(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copy_view_metadata(x, source)
        return x

    def _set_nothing(self, x: torch.Tensor) -> torch.Tensor:
        return self._set_tensor(x, self._new((0,), None, x.dtype, None, None))

    # Answers

    def _equal(self, x: torch.Tensor, other: torch.Tensor) -> bool:
        return x.shape == other.shape and bool((x == other).all().item())

    def _is_set_to(self, x: torch.Tensor, other: torch.Tensor) -> bool:
        same = get_attached_memory(x.untyped_storage()) is get_attached_memory(other.untyped_storage())
        torch_layout = (x.storage_offset(), x.shape, x.stride()) == (
            other.storage_offset(),
            other.shape,
            other.stride(),
        )
        return same and torch_layout

    def _chunk_cat_into(
        self, own: Callable[..., Any], tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
    ) -> torch.Tensor:
        """Into wider numbers, as FSDP reduces gradients, by a copy: eager casts them, too."""
        if all(tensor.dtype is out.dtype for tensor in tensors):
            return own(tensors, dim, num_chunks, out=out)  # type: ignore[no-any-return]
        made = aten._chunk_cat.default(tensors, dim, num_chunks)
        if made.shape != out.shape or torch.promote_types(made.dtype, out.dtype) is not out.dtype:
            return own(tensors, dim, num_chunks, out=out)  # type: ignore[no-any-return]
        return self.copies.copy_from(made, out)

    def _copy_each(
        self,
        together: Callable[..., Any],
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        non_blocking: bool = False,
    ) -> None:
        """One program, or, into views of one memory, as FSDP makes them, a write for each."""
        places = {id(get_attached_memory(target.untyped_storage())) for target in targets}
        if len(places) == len(targets):
            together(targets, sources, non_blocking)
            return
        for target, source in zip(targets, sources, strict=True):
            self.copies.copy_from(source, target, non_blocking)
        torch.autograd.graph.increment_version(targets)

    def _cholesky(self, x: torch.Tensor, upper: bool = False) -> torch.Tensor:
        factor: torch.Tensor
        factor, info = torch.linalg.cholesky_ex(x, upper=upper)
        self._check_errors(info, "cholesky", is_matrix=x.dim() == 2)
        return factor

    def _check_errors(self, info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
        aten._linalg_check_errors(self.copies.to_host(info), api_name, is_matrix=is_matrix)


def _fills_new_memory() -> bool:
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fills and torch.are_deterministic_algorithms_enabled()


def _new_elements(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Elements of the host that nobody wrote: zeros, or what torch fills such memory with to show that it is read."""
    return (torch.empty if _fills_new_memory() else torch.zeros)(sizes, dtype=dtype, device="cpu")


def _counted(run: Callable[..., Any], known: FunctionalForm, *args: Any, **kwargs: Any) -> Any:
    """The call of an op whose writes no other op counts here."""
    made = run(known, args, kwargs)
    count_writes(known, args, kwargs)
    return made


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Memory is pinned for torch's own devices; PJRT copies from any, and a copy is what torch promises here."""
    if device is not None and device.type != DEVICE_TYPE:
        return _PINNED(tensor, device)
    return tensor.clone()


def _attention_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Whether attention is one op, of which the package has a body, or torch makes it of others."""
    plain = dropout_p == 0 and query.dim() == 4 and query.is_floating_point()
    differentiable_mask = attn_mask is not None and attn_mask.requires_grad
    chosen = SDPBackend.OVERRIDEABLE if plain and not differentiable_mask else SDPBackend.MATH
    return int(chosen.value)


def _array_of(sizes: tuple[int, ...], strides: Sequence[int]) -> tuple[int, ...]:
    """The row-major array in which a new tensor of such strides lies; flat, where it has gaps or shares places."""
    order = memory_order(strides)
    array = tuple(sizes[dim] for dim in order)
    if tuple(strides[dim] for dim in order) == row_major_strides(array) or 0 in sizes:
        return array
    return (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)),)


_AS_STRIDED = get_meta_kernel(aten.as_strided.default)
_PINNED = get_composite_kernel(aten._pin_memory.default)


def _no_nested_tensor(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """That rows padded so can be no nested tensor: an encoder then keeps its padding."""
    return False
