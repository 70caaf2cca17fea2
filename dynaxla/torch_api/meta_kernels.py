"""What an op gives for fake tensors of plain sizes, by its meta kernel itself.

A `FakeTensorMode` gives the same, through Python that takes ten times as long: for every call it looks for constants, symbols,
devices and decompositions first. Ops whose result depends on the device are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.trees import tree_map_only

aten = torch.ops.aten

# Of these neither dtype nor strides depend on the device, and none gives more or fewer tensors on one.
_MOVING = (
    *(aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
    *(aten.slice.Tensor, aten.select.int, aten.cat.default, aten.flip.default, aten.constant_pad_nd.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.embedding.default, aten.gather.default),
    *(aten.index_select.default, aten.clone.default, aten.repeat.default),
)
_MAKING = (aten.full.default, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default)
_COMPUTING = (
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten._softmax.default, aten._log_softmax.default),
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.cumsum.default),
    *(aten.any.dim, aten.all.dim, aten.where.self, aten._scaled_dot_product_flash_attention_for_cpu.default),
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
    if "device" in kwargs:
        meta_kwargs["device"] = torch.device("meta")
    with torch.no_grad():
        made = op(*metas, **meta_kwargs)
    return tree_map_only(torch.Tensor, lambda meta: FakeTensor(mode, meta, device), made)


def _needs_no_device(op: OpOverload, operands: Sequence[torch.Tensor]) -> bool:
    if op is aten.native_layer_norm.default:  # the statistics of narrow floats have another dtype on some devices
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
