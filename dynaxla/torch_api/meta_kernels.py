"""What an op gives for fake tensors of plain sizes, by its meta kernel itself.

A `FakeTensorMode` gives the same, through Python that takes ten times as long: for every call it looks for constants, symbols,
devices and decompositions first. Ops whose result depends on the device are left to it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.private_device import taken_name
from dynaxla.torch_api.pytree import tree_map_only

_ATEN = torch.ops.aten

# Of these neither dtype nor strides depend on the device, and none gives more or fewer tensors on one.
_MOVING = (
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN.permute.default, _ATEN.transpose.int, _ATEN.t.default),
    *(_ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.squeeze.default),
    *(_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.cat.default, _ATEN.flip.default, _ATEN.constant_pad_nd.default),
    *(_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.embedding.default, _ATEN.gather.default),
    *(_ATEN.index_select.default, _ATEN.clone.default, _ATEN.repeat.default),
)
_MAKING = (_ATEN.full.default, _ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step, _ATEN.zeros.default)
_COMPUTING = (
    *(_ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN._softmax.default, _ATEN._log_softmax.default),
    *(_ATEN.sum.dim_IntList, _ATEN.mean.dim, _ATEN.amax.default, _ATEN.amin.default, _ATEN.cumsum.default),
    *(_ATEN.any.dim, _ATEN.all.dim, _ATEN.where.self, _ATEN._scaled_dot_product_flash_attention_for_cpu.default),
)
_NORMS = frozenset(
    (
        *(_ATEN.native_layer_norm.default, _ATEN.native_group_norm.default, _ATEN.native_batch_norm.default),
        *(_ATEN._native_batch_norm_legit.default, _ATEN._native_batch_norm_legit.no_stats),
        *(_ATEN._native_batch_norm_legit_functional.default, _ATEN._native_batch_norm_legit_no_training.default),
        *(_ATEN._batch_norm_with_update.default, _ATEN._batch_norm_with_update_functional.default),
        _ATEN._batch_norm_no_update.default,
    )
)
_OF_NO_DEVICE = frozenset((*_MOVING, *_MAKING, *_COMPUTING))
_WIDE = (torch.float32, torch.float64)


def result_of(mode: FakeTensorMode, op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The fake tensors that a call gives, of the mode in which its operands live.

    Relies on meta kernels being reached by tensors of the device "meta", and on `FakeTensor(mode, meta tensor, device)`.

    Raises:
        whatever the op raises for the arguments.
    """
    operands = [fake for value in (*args, *kwargs.values()) for fake in _fakes(value)]
    if not isinstance(op, OpOverload) or not _needs_no_device(op, operands):
        with mode:
            return op(*args, **kwargs)
    device = kwargs.get("device") or _device_of(operands)
    metas, meta_kwargs = tree_map_only(FakeTensor, _meta, (tuple(args), dict(kwargs)))
    if "device" in kwargs or op in _MAKING:  # without one these make real tensors
        meta_kwargs["device"] = torch.device("meta")
    with torch.no_grad():
        made = op(*metas, **meta_kwargs)
    return tree_map_only(torch.Tensor, lambda meta: FakeTensor(mode, meta, device), made)


def _needs_no_device(op: OpOverload, operands: Sequence[torch.Tensor]) -> bool:
    if op is _ATEN.native_layer_norm.default:  # the statistics of narrow floats have another dtype on some devices
        return operands[0].dtype in _WIDE
    return op in _OF_NO_DEVICE or (op.namespace == "aten" and torch.Tag.pointwise in op.tags)


def _device_of(operands: Sequence[torch.Tensor]) -> torch.device:
    """A tensor of no dims may lie on the CPU whatever the device of the others."""
    devices = [each.device for each in operands if each.dim()] or [each.device for each in operands]
    return devices[0] if devices else torch.device("cpu")


def _fakes(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else ()


def _meta(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")


def _histogram(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    return x.new_empty(bins)


def answer_as_host() -> None:
    """Has ops give fake tensors of the device as they give those of the host.

    Some give other sizes, dtypes or strides for what is not on the CPU, as CUDA's kernels do: norms, bags of embeddings, FFTs.
    The device's are the host's: by its programs, which are held to eager's, and where eager runs the op. But for histograms of
    integers, which mixtures of experts make on accelerators, and which the host has not.

    Relies on `device_hint` of torch's meta kernels being what they ask, and on `FakeTensorMode.dispatch`, by which all ops go:
    the norms ask tensors. A second call does nothing.
    """
    registrations: Any = importlib.import_module("torch._meta_registrations")
    own_hint, own_dispatch = registrations.device_hint, FakeTensorMode.dispatch
    if hasattr(own_hint, "__wrapped__"):
        return

    @wraps(own_hint)
    def hint(tensor: Any) -> str:
        kind: str = own_hint(tensor)
        return "cpu" if kind == taken_name() else kind

    @wraps(own_dispatch)
    def dispatch(mode: FakeTensorMode, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_norm = op in _NORMS
        asked = is_norm or (op is _ATEN.histc.default and not args[0].is_floating_point())
        if not (asked and isinstance(args[0], FakeTensor) and args[0].device.type == taken_name()):
            return own_dispatch(mode, op, types, args, kwargs)
        if not is_norm:
            with mode:
                return _histogram(*args, **(kwargs or {}))
        device = args[0].device
        with mode:
            on_host = tree_map_only(FakeTensor, lambda fake: fake.to("cpu"), (tuple(args), dict(kwargs or {})))
            return tree_map_only(FakeTensor, lambda fake: fake.to(device), op(*on_host[0], **on_host[1]))

    registrations.device_hint = hint
    FakeTensorMode.dispatch = dispatch  # type: ignore[assignment, method-assign]
