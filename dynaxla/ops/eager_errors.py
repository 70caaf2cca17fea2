"""Calls for which eager PyTorch raises by their dtypes and numbers alone, and which torch's fake kernels let pass.

Such a call is refused, so that eager PyTorch runs it, and raises.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from dynaxla.custom_ops.schema import arguments_of, tensor_of
from dynaxla.ops.record import Check


def overflows(number: complex, dtype: torch.dtype) -> bool:
    """Whether torch refuses to convert a plain number to a dtype ("value cannot be converted to type ... without overflow").

    Floats take infinities and NaN. Unsigned integers take negative numbers as far as these are above minus their largest.
    """
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        part = torch.float32 if dtype is torch.complex64 else torch.float64
        return any(overflows(each, part) for each in (complex(number).real, complex(number).imag))
    if isinstance(number, complex):
        return number.imag != 0 or overflows(number.real, dtype)
    if dtype.is_floating_point:
        return not (isinstance(number, float) and not math.isfinite(number)) and abs(number) > torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    lowest = limits.min if limits.min < 0 else -limits.max
    return not lowest <= number <= limits.max


def numbers_held(*names: str) -> Check:
    """Refuses calls of which one of these arguments is a number that the dtype of the result does not hold."""

    def check(node: Node) -> str | None:
        dtype, given = node.meta["val"].dtype, arguments_of(node)
        for name in names:
            number = given[name]
            if isinstance(number, (int, float, complex)) and overflows(number, dtype):
                return f"{dtype} does not hold {number}"
        return None

    return check


def one_dtype(node: Node) -> str | None:
    """Refuses products of tensors of several dtypes."""
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    dtypes = dict.fromkeys(value.dtype for value in values if isinstance(value, torch.Tensor))
    return None if len(dtypes) < 2 else f"operands of {' and '.join(map(str, dtypes))}"


def source_of_one_dtype(name: str) -> Check:
    """Refuses writes of tensors of another dtype than that of the tensor that is written to."""

    def check(node: Node) -> str | None:
        x, source = tensor_of(node, "self"), tensor_of(node, name)
        return None if x.dtype == source.dtype else f"{source.dtype} into {x.dtype}"

    return check


def labels(node: Node) -> str | None:
    """Refuses labels that are no int64, nor bytes."""
    dtype = tensor_of(node, "target").dtype
    return None if dtype in (torch.int64, torch.uint8) else f"labels of {dtype}"


def no_zero_divisor(node: Node) -> str | None:
    """Refuses divisions of whole numbers by a plain zero."""
    number, dtype = arguments_of(node)["other"], node.meta["val"].dtype
    whole = not dtype.is_floating_point and not dtype.is_complex
    return "a division of whole numbers by zero" if whole and isinstance(number, int) and number == 0 else None


def real_number(node: Node) -> str | None:
    """Refuses comparisons with a complex number."""
    return "a complex number has no order" if isinstance(arguments_of(node)["other"], complex) else None


def both(*checks: Check) -> Check:
    """Refuses what one of these refuses."""

    def check(node: Node) -> str | None:
        return next((refused for each in checks if (refused := each(node)) is not None), None)

    return check
