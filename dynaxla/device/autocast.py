"""Autocast on the device: ops take the dtypes that they take on torch's other accelerators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.autocast_lists import (
    FLOAT32,
    FLOAT32_BY_DTYPE,
    LOWER_PRECISION,
    WIDEST,
    autocast_dtype,
    call_without_autocast,
    overloads_of,
)
from dynaxla.torch_api.overloads import OpOverload, parameters
from dynaxla.torch_api.private_device import Kernels
from dynaxla.torch_api.pytree import tree_leaves, tree_map_only
from dynaxla.types import DEVICE_TYPE

_NARROW = (torch.bfloat16, torch.float16)


def register_autocast(kernels: Kernels) -> None:
    """Gives the ops of torch's lists a kernel for autocast."""
    for names, cast in ((LOWER_PRECISION, _lower), (FLOAT32, _in_float32), (WIDEST, _in_widest)):
        for op in overloads_of(names):
            kernels.add_autocast(op, _kernel(op, cast))
    for op in overloads_of(FLOAT32_BY_DTYPE):
        kernels.add_autocast(op, partial(_by_dtype, op))
    kernels.end_autocast()


def _kernel(op: OpOverload, cast: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return call_without_autocast(_cast_and_call, (op, cast, args, kwargs), {})

    return run


def _cast_and_call(op: OpOverload, cast: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs))
    return op(*args, **kwargs)


def _lower(given: Any) -> Any:
    return _to(autocast_dtype(DEVICE_TYPE), given)


def _in_float32(given: Any) -> Any:
    return _to(torch.float32, given)


def _in_widest(given: Any) -> Any:
    dtypes = {leaf.dtype for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and _is_cast(leaf)}
    return _to(torch.float32, given) if torch.float32 in dtypes else _to(autocast_dtype(DEVICE_TYPE), given)


def _by_dtype(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """With `dtype=torch.float32` where the call leaves the dtype out."""
    names = [parameter.name for parameter in parameters(op)]
    given = dict(zip(names, args, strict=False)) | kwargs
    if args[0].dtype in _NARROW and given.get("dtype") is None:
        given["dtype"] = torch.float32
        args, kwargs = args[:1], {name: value for name, value in given.items() if name != names[0]}
    return call_without_autocast(op, args, kwargs)


def _to(dtype: torch.dtype, given: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if _is_cast(tensor) else tensor, given)


def _is_cast(tensor: Tensor) -> bool:
    """Whether autocast changes a tensor: floats of the device, but no doubles."""
    return tensor.device.type == DEVICE_TYPE and tensor.is_floating_point() and tensor.dtype != torch.float64
