"""Checks for calls whose dtypes, sizes and numbers make eager PyTorch raise, but not torch's fake kernels.

Such a call is refused, so that eager PyTorch runs it and raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Node

from dynaxla.custom_ops.schema import arguments_of, operand_dtype, tensor_of
from dynaxla.ops.record import Check
from dynaxla.torch_api.symbols import example


def overflows(number: complex, dtype: torch.dtype) -> bool:
    """Whether torch refuses to convert a plain number to a dtype ("value cannot be converted to type ... without overflow").

    Floats take infinities, if they have them, and NaN. Unsigned integers take negative numbers down to minus their largest.
    """
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        part = torch.float32 if dtype is torch.complex64 else torch.float64
        return any(overflows(each, part) for each in (complex(number).real, complex(number).imag))
    if isinstance(number, complex):
        return number.imag != 0 or overflows(number.real, dtype)
    if dtype.is_floating_point:
        if isinstance(number, float) and not math.isfinite(number):
            return math.isinf(number) and dtype is torch.float8_e4m3fn
        return abs(number) > torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    lowest = limits.min if limits.min < 0 else -limits.max
    return not lowest <= number <= limits.max


def check_numbers_fit(*names: str) -> Check:
    """Makes a check that refuses calls with a number, in one of these arguments, that overflows the result's dtype, or is
    complex where that is not: some ops refuse all of these."""

    def check(node: Node) -> str | None:
        dtype, given = node.meta["val"].dtype, arguments_of(node)
        for name in names:
            number = given[name]
            if not isinstance(number, (int, float, complex)):
                continue
            if overflows(number, dtype) or (isinstance(number, complex) and not dtype.is_complex):
                return f"{dtype} does not hold {number}"
        return None

    return check


def reason_not_scalable(number: complex, dtype: torch.dtype) -> str | None:
    """The reason why torch refuses to scale by a plain number in a dtype (`alpha` of sums and outer products), or None.

    For other arguments (`value` of addcmul, `alpha` of addmm) torch truncates fractions in integer dtypes.
    """
    if isinstance(number, bool) and dtype is not torch.bool:
        return f"a bool scales {dtype}"
    if isinstance(number, complex) and not dtype.is_complex:
        return f"a complex number scales {dtype}"
    if isinstance(number, float) and not (dtype.is_floating_point or dtype.is_complex):
        return f"a float scales {dtype}"
    return f"{dtype} does not hold {number}" if overflows(number, dtype) else None


def check_scales(*names: str) -> Check:
    """Makes a check that refuses calls with a number, in one of these arguments, that torch does not scale the dtype by."""

    def check(node: Node) -> str | None:
        dtype, given = node.meta["val"].dtype, arguments_of(node)
        numbers = (given[name] for name in names if isinstance(given[name], (int, float, complex)))
        return next((refused for each in numbers if (refused := reason_not_scalable(each, dtype)) is not None), None)

    return check


def check_quotient_dtype(node: Node) -> str | None:
    """Refuses addcdiv of two integer tensors."""
    dtypes = [operand_dtype(node, name) for name in ("tensor1", "tensor2")]
    whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    return "a quotient of integers" if whole else None


def _dtypes(node: Node) -> list[torch.dtype]:
    """The dtypes of the tensors among a call's operands, in their order; sizes that vary are operands too."""
    values = (operand.meta["val"] for operand in node.all_input_nodes)
    return [value.dtype for value in values if isinstance(value, torch.Tensor)]


def check_one_dtype(node: Node) -> str | None:
    """Refuses tensors of several dtypes: of products eager raises, and of others torch's fake kernels say another dtype."""
    dtypes = dict.fromkeys(_dtypes(node))
    return None if len(dtypes) < 2 else f"operands of {' and '.join(map(str, dtypes))}"


def check_parameters(node: Node) -> str | None:
    """Refuses parameters of a normalization that are not of its input's dtype, nor float32 beside a 16-bit input."""
    x, *others = _dtypes(node)
    allowed = torch.float32 if x in (torch.bfloat16, torch.float16) else x
    found = dict.fromkeys(others)
    return None if found.keys() <= {x} or found.keys() <= {allowed} else f"{x} with {' and '.join(map(str, found))}"


def check_softmax_dtype(node: Node) -> str | None:
    """Refuses gradients of a softmax in another dtype: eager's kernel raises, or does not convert."""
    wanted = arguments_of(node)["input_dtype"]
    return check_one_dtype(node) if tensor_of(node, "grad_output").dtype is wanted else f"a gradient in {wanted}"


def check_source_dtype(name: str) -> Check:
    """Makes a check that refuses a source whose dtype differs from that of the tensor that it is written to."""

    def check(node: Node) -> str | None:
        x, source = tensor_of(node, "self"), tensor_of(node, name)
        return None if x.dtype == source.dtype else f"{source.dtype} into {x.dtype}"

    return check


def check_rank(name: str, *ranks: int) -> Check:
    """Makes a check that refuses a tensor, in this argument, whose number of dims is none of these."""

    def check(node: Node) -> str | None:
        found = tensor_of(node, name).ndim
        return None if found in ranks else f"{name} has {found} dims"

    return check


def check_half(node: Node) -> str | None:
    """Refuses a gradient of a gated unit that is longer, along the gate's dim, than half of the input."""
    gradient, x, dim = tensor_of(node, "grad_output"), tensor_of(node, "self"), arguments_of(node)["dim"]
    length, whole = example(gradient.shape[dim]), example(x.shape[dim])
    if length is None or whole is None:
        return None
    return f"a gradient of {length} for an input of {whole}" if length > 1 and length * 2 > whole else None


def check_labels(node: Node) -> str | None:
    """Refuses labels whose dtype is neither int64 nor uint8, and weights of classes that are not of the input's dtype."""
    dtype, weight = tensor_of(node, "target").dtype, arguments_of(node)["weight"]
    if dtype not in (torch.int64, torch.uint8):
        return f"labels of {dtype}"
    x = tensor_of(node, "self").dtype
    return None if weight is None or weight.meta["val"].dtype is x else f"weights of {weight.meta['val'].dtype} for {x}"


def check_dim(node: Node) -> str | None:
    """Refuses a dim that the operand does not have: torch's fake kernels of some ops do not look."""
    dim, rank = arguments_of(node)["dim"], tensor_of(node, "self").ndim
    return None if -max(rank, 1) <= dim < max(rank, 1) else f"dim {dim} of a tensor of {rank} dims"


def check_has_elements(node: Node) -> str | None:
    """Refuses reductions, along a dim or of the whole tensor, that have no elements."""
    sizes, dim = tensor_of(node, "self").shape, arguments_of(node).get("dim")
    reduced = sizes if dim is None or not sizes else sizes[dim : dim + 1 or None]
    return "no elements" if any(example(size) == 0 for size in reduced) else None


def reason_no_places(read: Iterable[int], indices: Iterable[torch.Tensor]) -> str | None:
    """The reason why torch refuses to read at indices along dims of these sizes, or None: one has no places, and no index is
    empty."""
    has_none = any(example(size) == 0 for size in read)
    return "a dim without places" if has_none and all(0 not in map(example, each.shape) for each in indices) else None


def check_rows(node: Node) -> str | None:
    """Refuses lookups in a table without rows."""
    return reason_no_places(tensor_of(node, "weight").shape[:1], [tensor_of(node, "indices")])


def reason_not_of_shape(source: torch.Tensor, sizes: Sequence[int]) -> str | None:
    """The reason why torch refuses to write a tensor to a place of these sizes, for which it broadcasts nothing, or None."""
    found, wanted = ([example(size) for size in each] for each in (source.shape, sizes))
    return None if None in (*found, *wanted) or found == wanted else f"a source of {found} for a place of {wanted}"


def check_no_bool(name: str) -> Check:
    """Makes a check that refuses a plain bool in this argument."""

    def check(node: Node) -> str | None:
        return f"{name} is a bool" if isinstance(arguments_of(node)[name], bool) else None

    return check


def check_number(name: str, allows: Callable[[float], bool]) -> Check:
    """Makes a check that refuses calls in which the number that this argument is is none that eager takes."""

    def check(node: Node) -> str | None:
        number = arguments_of(node)[name]
        return f"{name} is {number}" if isinstance(number, (int, float)) and not allows(number) else None

    return check


def check_slope(is_result: str, *slopes: str) -> Check:
    """Makes a check that refuses gradients that are read off a result whose sign its argument may not have: those of an
    activation in place with a negative slope."""

    def check(node: Node) -> str | None:
        given = arguments_of(node)
        values = [given[name] for name in slopes]
        if not given[is_result]:
            return None
        if any(isinstance(value, Node) for value in values):
            return "a slope that varies, in place"
        slope = sum(values) / len(values)
        return f"a slope of {slope}, in place" if slope < 0 else None

    return check


def check_bounds(node: Node) -> str | None:
    """Refuses bools between two bounds, or beside a plain number."""
    bounds = [argument for name, argument in arguments_of(node).items() if name in ("min", "max")]
    has_kernel = sum(bound is not None for bound in bounds) == 1 and any(isinstance(bound, Node) for bound in bounds)
    return "bounds of bools" if node.meta["val"].dtype is torch.bool and not has_kernel else None


def check_whole_quotient(node: Node) -> str | None:
    """Refuses quotients of complex numbers that are to be rounded."""
    is_rounded = arguments_of(node)["rounding_mode"] is not None
    return "rounded complex numbers" if is_rounded and node.meta["val"].dtype.is_complex else None


def check_inexact(name: str) -> Check:
    """Makes a check that refuses a tensor of whole numbers in this argument."""

    def check(node: Node) -> str | None:
        dtype = tensor_of(node, name).dtype
        return None if dtype.is_floating_point or dtype.is_complex else f"{name} of {dtype}"

    return check


def check_divisor(node: Node) -> str | None:
    """Refuses divisions of integers by the number zero."""
    number, dtype = arguments_of(node)["other"], node.meta["val"].dtype
    whole = not dtype.is_floating_point and not dtype.is_complex
    return "a division of whole numbers by zero" if whole and isinstance(number, int) and number == 0 else None


def check_real_number(node: Node) -> str | None:
    """Refuses comparisons with a complex number."""
    return "a complex number has no order" if isinstance(arguments_of(node)["other"], complex) else None


def check_all(*checks: Check) -> Check:
    """Makes a check that refuses what any of these checks refuses."""

    def check(node: Node) -> str | None:
        return next((refused for each in checks if (refused := each(node)) is not None), None)

    return check
