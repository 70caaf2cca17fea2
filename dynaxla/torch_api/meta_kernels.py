"""Computes an op's result for fake tensors of static sizes by calling its meta kernel directly.

A `FakeTensorMode` gives the same result, through Python that takes ten times as long: for every call it first checks
for constants, symbols, devices and decompositions. Ops whose result depends on the device still use the mode.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch._decomp import meta_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dynaxla.torch_api.mutation_schema import find_functional_variant
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.private_device import get_registered_device_type
from dynaxla.torch_api.pytree import tree_map_only

_ATEN = torch.ops.aten

# The dtype, the strides and the number of results of these ops are the same on every device.
_LAYOUT_OPS = (
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN.permute.default, _ATEN.transpose.int, _ATEN.t.default),
    *(_ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.squeeze.default),
    *(_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.cat.default, _ATEN.flip.default, _ATEN.constant_pad_nd.default),
    *(_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.embedding.default, _ATEN.gather.default),
    *(_ATEN.index_select.default, _ATEN.clone.default, _ATEN.repeat.default),
)
_CREATION_OPS = (
    _ATEN.full.default,
    _ATEN.arange.default,
    _ATEN.arange.start,
    _ATEN.arange.start_step,
    _ATEN.zeros.default,
)
_COMPUTE_OPS = (
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
_IN_PLACE = (
    *(_ATEN.add_.Tensor, _ATEN.add_.Scalar, _ATEN.sub_.Tensor, _ATEN.sub_.Scalar, _ATEN.mul_.Tensor, _ATEN.mul_.Scalar),
    *(_ATEN.addcmul_.default, _ATEN.addcdiv_.default, _ATEN.ldexp_.default, _ATEN.logit_.default),
)
"""Ops that write into their first operand and whose meta kernels do not ask whether it takes the result's dtype."""
_DEVICE_INDEPENDENT = frozenset((*_LAYOUT_OPS, *_CREATION_OPS, *_COMPUTE_OPS))
_WIDE = (torch.float32, torch.float64)


def run_meta_kernel(
    mode: FakeTensorMode, op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Returns the fake results of a call, in the mode of its operands.

    Relies on tensors of the device "meta" calling meta kernels, and on `FakeTensor(mode, meta tensor, device)`.

    Raises:
        any error of the op for these arguments.
    """
    operands = [fake for value in (*args, *kwargs.values()) for fake in _tensors_in(value)]
    if not isinstance(op, OpOverload) or not _is_device_independent(op, operands):
        with mode:
            return op(*args, **kwargs)
    device = kwargs.get("device") or _device_of(operands)
    metas, meta_kwargs = tree_map_only(FakeTensor, _to_meta, (tuple(args), dict(kwargs)))
    if "device" in kwargs or op in _CREATION_OPS:  # without a device these ops make real tensors
        meta_kwargs["device"] = torch.device("meta")
    with torch.no_grad():
        meta_results = op(*metas, **meta_kwargs)
    return tree_map_only(torch.Tensor, lambda meta: FakeTensor(mode, meta, device), meta_results)


def _is_device_independent(op: OpOverload, operands: Sequence[torch.Tensor]) -> bool:
    if op is _ATEN.native_layer_norm.default:  # the statistics of 16-bit floats have another dtype on some devices
        return operands[0].dtype in _WIDE
    is_pointwise = op.namespace == "aten" and torch.Tag.pointwise in op.tags
    return op in _DEVICE_INDEPENDENT or (is_pointwise and bool(operands))  # of numbers alone the result would be real


def _device_of(operands: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device of the operands; a 0-dim tensor may be on the CPU whatever the device of the others."""
    devices = [each.device for each in operands if each.dim()] or [each.device for each in operands]
    return devices[0] if devices else torch.device("cpu")


def _tensors_in(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else ()


def _to_meta(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")


def _histogram(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    return x.new_empty(bins)


def use_cpu_meta_kernels() -> None:
    """Has ops return fake tensors of the device with the sizes, dtypes and strides that they have on the CPU.

    Some meta kernels return others for any device but the CPU, as CUDA's kernels do: norms, bags of embeddings, FFTs.
    The device's results are the CPU's: its programs are checked against eager, and unsupported ops run on the CPU in
    eager. The exception is histograms of integers, which mixtures of experts compute on accelerators, and which the CPU
    does not support.

    Relies on torch's meta kernels calling `device_hint`, and on `FakeTensorMode.dispatch`, through which all ops go:
    the norms look at the tensors' devices. A second call does nothing.
    """
    registrations: Any = importlib.import_module("torch._meta_registrations")
    own_hint, own_dispatch = registrations.device_hint, FakeTensorMode.dispatch
    if hasattr(own_hint, "__wrapped__"):
        return

    @wraps(own_hint)
    def hint(tensor: Any) -> str:
        kind: str = own_hint(tensor)
        return "cpu" if kind == get_registered_device_type() else kind

    @wraps(own_dispatch)
    def dispatch(mode: FakeTensorMode, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_norm = op in _NORMS
        intercepted = is_norm or (op is _ATEN.histc.default and not args[0].is_floating_point())
        if not (
            intercepted and isinstance(args[0], FakeTensor) and args[0].device.type == get_registered_device_type()
        ):
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


@cache
def refuse_lossy_writes() -> torch.library.Library:
    """Has meta kernels of ops that write in place raise where eager does: `whole.mul_(real)`, and `_foreach_mul_` so.

    Without it a captured call computes the result in its own dtype and casts it, which drops fractions and imaginary parts.

    Relies on a kernel for the dispatch key "Meta" taking the place of torch's, which ops called in Python have in `py_kernels`,
    too; on `_foreach_` ops of meta tensors calling those of single tensors; and on fake tensors calling an op that is in
    `meta_table` instead of its decomposition.

    Returns:
        The owner of the kernels. A second call does nothing.
    """
    library = torch.library.Library("aten", "IMPL", "Meta")
    for op in _IN_PLACE:
        kernel = _refuse_lossy_write(op)
        library.impl(op, kernel, allow_override=True)
        op.py_kernels[torch._C.DispatchKey.Meta] = meta_table[op] = kernel
        op._dispatch_cache.clear()
    return library


def _refuse_lossy_write(op: OpOverload) -> Callable[..., torch.Tensor]:
    own, functional = meta_table.get(op), find_functional_variant(op)
    assert functional is not None

    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = functional(self, *args, **kwargs)
        if not torch.can_cast(made.dtype, self.dtype):
            raise RuntimeError(f"result type {made.dtype} can't be cast to the desired output type {self.dtype}")
        if own is not None:
            own(self, *args, **kwargs)
        elif made.shape != self.shape:
            raise RuntimeError(f"output with shape {[*self.shape]} doesn't match the broadcast shape {[*made.shape]}")
        return self

    return kernel
