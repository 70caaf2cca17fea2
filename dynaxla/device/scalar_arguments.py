"""Calls whose plain numbers are inputs of their programs, so that `x * 0.37` and `x * 0.38` are one program.

A number in the place of a tensor, as of a binary operator, is a tensor of no dims to the program. Numbers that an op's schema
takes as such (`alpha`, `value`, what to fill with) are inputs in the ops that stand here, each with the same arithmetic on
tensors. All other numbers are part of the program.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dynaxla.diagnostics import FallbackReason, ReasonId
from dynaxla.ops.eager_errors import overflows, reason_not_scalable
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import upload
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves

MOST_VECTORS = 4096
"""Buffers of plain numbers that are kept."""

aten = torch.ops.aten
FILLS = (
    *(aten.fill.Scalar, aten.masked_fill.Scalar, aten.full.default, aten.new_full.default, aten.full_like.default),
    aten.scalar_tensor.default,
)
"""Their numbers are converted to the dtype of the result at once."""

_DIVISIONS = (aten.floor_divide.default, aten.div.Tensor_mode)
_SUMS = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar),
    *(aten._foreach_add.List, aten._foreach_sub.List),
)
_WITH_PRODUCTS = (
    *(aten.addcmul.default, aten._foreach_addcmul.Scalar, aten._foreach_addcmul.ScalarList),
    *(aten.addcdiv.default, aten._foreach_addcdiv.Scalar, aten._foreach_addcdiv.ScalarList),
)
CHECKED = frozenset((*FILLS, aten.masked_fill.Scalar, aten.clamp.default, *_DIVISIONS, *_SUMS, *_WITH_PRODUCTS))
"""For some of their numbers eager PyTorch raises, or computes with another number."""

_NARROW = (torch.bfloat16, torch.float16)

Rewritten = Callable[..., Any]
"""Takes a call's arguments, with tensors of no dims in the places of its numbers."""


def number_dtype(kind: type, dtypes: Collection[torch.dtype]) -> torch.dtype:
    """The dtype in which a call of tensors takes a number: eager computes 16-bit floats in float32, numbers too."""
    if set(dtypes) & {torch.float64, torch.complex128}:
        return torch.float64
    if any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        return torch.float32
    return torch.int64 if kind is int else torch.get_default_dtype()


def eager_error_reason(
    function: Any, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[float]
) -> FallbackReason | None:
    """Why a call of one of `CHECKED` is left to eager PyTorch, which raises or cuts fractions off; None for other numbers."""
    if function in _SUMS:
        details = _of_alpha(args, kwargs)
    elif function in _WITH_PRODUCTS:
        complexes = (each for each in tree_leaves((args[3:], kwargs)) if isinstance(each, complex))  # are no inputs
        details = (_of_value(each, [tensor.dtype for tensor in tensors]) for each in (*numbers, *complexes))
    elif function in _DIVISIONS:
        details = (_of_divisor(number, tensors) for number in numbers)
    else:
        details = (_of_filling(function, number, tensors, kwargs.get("dtype")) for number in numbers)
    detail = next((each for each in details if each is not None), None)
    return None if detail is None else FallbackReason(ReasonId.UNSUPPORTED_CALL, str(function), detail=detail)


def _of_alpha(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str | None]:
    """What torch has against the scale of a sum, or of sums of lists."""
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    if alpha != 1 or isinstance(alpha, float):
        columns = [each if isinstance(each, (list, tuple)) else (each,) for each in args[:2]]
        yield from (reason_not_scalable(alpha, torch.result_type(*pair)) for pair in zip(*columns, strict=False))


def _of_value(number: complex, dtypes: Collection[torch.dtype]) -> str | None:
    """What torch has against the scale of a product that is added, or what it computes with instead."""
    if all(dtype is torch.bool for dtype in dtypes):
        return "products of bools are not added"
    if isinstance(number, float) and not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        return f"{number} scales whole numbers, without its fraction"
    return next((f"{dtype} does not hold {number}" for dtype in dtypes if overflows(number, dtype)), None)


def _of_divisor(number: float, tensors: Sequence[Tensor]) -> str | None:
    whole = bool(tensors) and not tensors[0].is_floating_point() and not tensors[0].is_complex()
    return "a division of whole numbers by zero" if number == 0 and isinstance(number, int) and whole else None


def _of_filling(function: Any, number: float, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> str | None:
    if function is aten.clamp.default and tensors:
        dtype = torch.result_type(tensors[0], number)
    elif dtype is None and tensors:
        dtype = tensors[0].dtype
    return f"{dtype} does not hold {number}" if dtype is not None and overflows(number, dtype) else None


@cache
def lift_scalars() -> Mapping[Any, tuple[frozenset[str], Rewritten]]:
    """Of ops that write nothing: the parameters whose numbers are inputs, and the call on tensors."""
    found: dict[Any, tuple[frozenset[str], Rewritten]] = {
        aten.fill.Scalar: (frozenset({"value"}), _fill),
        aten.masked_fill.Scalar: (frozenset({"value"}), _masked_fill),
        aten.add.Tensor: (frozenset({"alpha"}), _add),
        aten.sub.Tensor: (frozenset({"alpha"}), _sub),
        aten.rsub.Scalar: (frozenset({"other", "alpha"}), _rsub),
        aten.rsub.Tensor: (frozenset({"alpha"}), _rsub),
        aten.addcmul.default: (frozenset({"value"}), _addcmul),
        aten.addcdiv.default: (frozenset({"value"}), _addcdiv),
        aten.lerp.Scalar: (frozenset({"weight"}), _lerp),
        aten.clamp.default: (frozenset({"min", "max"}), aten.clamp.Tensor),
        aten.full.default: (frozenset({"fill_value"}), lambda size, value, **options: value.expand(size)),
        aten.new_full.default: (frozenset({"fill_value"}), lambda x, size, value, **options: value.expand(size)),
        aten.full_like.default: (frozenset({"fill_value"}), lambda x, value, **options: value.expand(x.shape)),
        aten.scalar_tensor.default: (frozenset({"s"}), lambda value, **options: value),
    }
    for name in ("mul", "add", "sub", "div", "eq", "ne", "lt", "le", "gt", "ge"):
        on_tensors = _as_other(name)
        found[getattr(aten, name).Scalar] = (frozenset({"other", "alpha"}), on_tensors)
        if hasattr(aten, f"_foreach_{name}"):
            _add_foreach(found, name, {"Scalar": "scalar", "ScalarList": "scalars"}, on_tensors)
    _add_foreach(found, "addcmul", {"Scalar": "value", "ScalarList": "scalars"}, _addcmul)
    _add_foreach(found, "addcdiv", {"Scalar": "value", "ScalarList": "scalars"}, _addcdiv)
    _add_foreach(found, "lerp", {"Scalar": "weight"}, _lerp)
    _add_foreach(found, "add", {"List": "alpha"}, _add)
    _add_foreach(found, "sub", {"List": "alpha"}, _sub)
    return found


def _add_foreach(found: dict[Any, Any], name: str, parameters: Mapping[str, str], on_one: Rewritten) -> None:
    packet = getattr(aten, f"_foreach_{name}")
    for overload, parameter in parameters.items():
        found[getattr(packet, overload)] = (frozenset({parameter}), partial(_each, on_one))


def _each(on_one: Rewritten, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The op on every tensor of lists; what is no list goes to every call."""
    count = len(args[0])
    named = list(kwargs.values())
    columns = [arg if isinstance(arg, (list, tuple)) else [arg] * count for arg in (*args, *named)]
    return [on_one(*(column[i] for column in columns)) for i in range(count)]


def _as_other(name: str) -> Rewritten:
    if name in ("add", "sub"):
        return _add if name == "add" else _sub
    on_tensors: OpOverload = getattr(aten, name).Tensor

    def run(x: Tensor, other: Any) -> Tensor:
        return on_tensors(x, other)  # type: ignore[no-any-return]

    return run


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in _NARROW else x


def _fill(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype).expand(x.shape)


def _masked_fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return aten.masked_fill.Tensor(x, mask, value.to(x.dtype))  # type: ignore[no-any-return]


def _add(x: Tensor, other: Tensor, alpha: Any = 1) -> Any:
    return _wide(x) + _times(_wide(other), alpha)


def _sub(x: Tensor, other: Tensor, alpha: Any = 1) -> Any:
    return _wide(x) - _times(_wide(other), alpha)


def _times(x: Tensor, alpha: Any) -> Any:
    return x * alpha if isinstance(alpha, Tensor) or alpha != 1 else x


def _rsub(x: Tensor, other: Any, alpha: Any = 1) -> Any:
    return other - _wide(x) * alpha


def _addcmul(x: Tensor, one: Tensor, other: Tensor, value: Any = 1) -> Any:
    return _wide(x) + _wide(one.to(torch.result_type(x, one))) * value * _wide(other)


def _addcdiv(x: Tensor, one: Tensor, other: Tensor, value: Any = 1) -> Any:
    return _wide(x) + _wide(one.to(torch.result_type(x, one))) * value / _wide(other)


def _lerp(x: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    x, end = _wide(x), _wide(end)
    return torch.where(weight.abs() < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))


class ScalarBuffers:
    """Buffers of plain numbers, which most calls have from the call before."""

    def __init__(self, client: PjrtClient) -> None:
        self._client = client
        self._kept: dict[Any, Buffer] = {}

    def buffer(self, dtype: torch.dtype, numbers: Sequence[float]) -> Buffer:
        """A vector of these numbers."""
        form = "d" if dtype.is_floating_point else "q"
        key = dtype, struct.pack(f"{len(numbers)}{form}", *numbers)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MOST_VECTORS:
                self._kept.clear()
            found = self._kept[key] = upload(self._client, torch.tensor(numbers, dtype=dtype, device="cpu"))
        return found
