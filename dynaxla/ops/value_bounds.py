"""What eager PyTorch requires of the values of a call's tensors: the one table that the device's checks and the graphs' read.

A row is a function of a call's arguments by name. It compares no two sizes: in a graph that varies they are symbolic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.symbols import is_at_least

aten = torch.ops.aten
Number = float | torch.SymInt


@dataclass(frozen=True, slots=True)
class ValueBound:
    """The range in which the values of a tensor must lie.

    Attributes:
        values: the tensor, of any device.
        lowest, highest: the range, ends included.
        fault: what is wrong with other values.
        error: the class of eager's error.
        prepare: computes what must lie in the range of the values; None: they themselves.
    """

    values: Tensor
    lowest: Number
    highest: Number
    fault: str
    error: type[Exception] = IndexError
    prepare: Callable[[Tensor], Tensor] | None = None

    def find_ends(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest of what must lie in the range, of `self.values` on any device; NaN if one is, the lowest
        that may be of nothing."""
        found = values if self.prepare is None else self.prepare(values)
        return torch.aminmax(found) if found.numel() else (found.new_full((), self.lowest),) * 2  # type: ignore[arg-type]

    def allows(self, least: float, largest: float) -> bool:
        """Whether the range has both ends; it has no NaN."""
        return bool(self.lowest <= least and largest <= self.highest)

    def comparisons(self, dtype: torch.dtype) -> list[tuple[OpOverload, Number]]:
        """What values of a dtype are compared with, by which op. Not with plain ends that no value is beyond: torch would wrap
        them into the dtype."""
        limits = torch.iinfo(dtype) if not (dtype.is_floating_point or dtype.is_complex) else None
        lower = not isinstance(self.lowest, torch.SymInt) and limits is not None and self.lowest <= limits.min
        upper = not isinstance(self.highest, torch.SymInt) and self.highest >= (limits.max if limits else math.inf)
        below = [] if lower else [(aten.ge.Scalar, self.lowest)]
        return below if upper else [*below, (aten.le.Scalar, self.highest)]

    def holds(self) -> Tensor:
        """Whether all values lie in the range: a bool of no dims."""
        found = self.values if self.prepare is None else self.prepare(self.values)
        if found.dtype is torch.bool:
            return found.all()
        within = [op(found, end) for op, end in self.comparisons(found.dtype)]
        both: Tensor = functools.reduce(torch.bitwise_and, within)
        return both.all()


Arguments = Mapping[str, Any]
Bounds = Callable[[Arguments], Iterator[ValueBound]]
"""Takes an op's arguments by name."""


@cache
def bounds_of(name: str) -> Bounds | None:
    """The row of an overload, "aten.index_add_.default"."""
    if not name.startswith("aten."):
        return None
    _, packet, overload = name.split(".")
    packet = packet.removesuffix("_")
    return _BOUNDS.get(f"{packet}.{overload}", _BOUNDS.get(packet))


def _along_dim(given: Arguments, error: type[Exception] = IndexError, wraps: bool = False) -> Iterator[ValueBound]:
    x, dim = given["self"], given["dim"]
    if isinstance(dim, int) and -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        size = x.shape[dim] if x.dim() else 1
        fault = f"an index of dimension {dim} is out of range"
        yield ValueBound(given["index"], -size if wraps else 0, size - 1, fault, error)


def _of_writes(given: Arguments) -> Iterator[ValueBound]:
    """A mask alone takes a value for each place that it chooses, where these are counted by a dim of the values."""
    indices, values = given["indices"], given["values"]
    placed = [(place, index) for place, index in enumerate(indices) if index is not None]
    if [index.dtype in (torch.bool, torch.uint8) for _, index in placed] != [True]:
        yield from _of_dims(given)
        return
    place, mask = placed[0]
    under = given["self"].dim() - place - mask.dim()  # dims behind those under the mask
    count = values.shape[-under - 1] if values.dim() > under else 1
    if not isinstance(count, int) or count != 1:
        fault = "shape mismatch: the values are not as many as the places that the mask chooses"
        yield ValueBound(mask, count, count, fault, RuntimeError, lambda mask: mask.bool().sum())


def _of_dims(given: Arguments) -> Iterator[ValueBound]:
    indices = given["indices"]
    are_numbers = all(index is None or index.dtype in (torch.int64, torch.int32) for index in indices)
    if are_numbers:  # a mask may have several dims
        for dim, (size, index) in enumerate(zip(given["self"].shape, indices, strict=False)):
            if index is not None:
                yield ValueBound(index, -size, size - 1, f"an index of dimension {dim} is out of range")


def _of_fillings(given: Arguments) -> Iterator[ValueBound]:
    """A number, in a tensor of no dims, that is written as a plain one: the dtype must hold it. Only floats hold infinities."""
    dtype, value = given["self"].dtype, given["value"]
    if torch.bool in (dtype, value.dtype) or dtype is value.dtype or value.is_complex():
        return
    fault = f"{dtype} does not hold the value"
    if dtype.is_floating_point or dtype.is_complex:
        highest = torch.finfo(dtype).max
        prepare = (lambda value: value.where(value.isfinite(), 0)) if value.is_floating_point() else None
        found = ValueBound(value, -highest, highest, fault, RuntimeError, prepare)
        holds_all = value.is_floating_point() and torch.finfo(value.dtype).max <= highest
    else:
        limits = torch.iinfo(dtype)
        wraps = limits.min == 0 and not value.is_floating_point()
        found = ValueBound(value, -limits.max if wraps else limits.min, limits.max, fault, RuntimeError)
        holds_all = False
    if not holds_all and found.comparisons(value.dtype):
        yield found


def _of_places_and_fillings(given: Arguments) -> Iterator[ValueBound]:
    if isinstance(given["value"], Tensor):
        yield from _of_fillings(given)
    yield from _along_dim(given, wraps=True)


def _of_elements(given: Arguments) -> Iterator[ValueBound]:
    count = given["self"].numel()
    yield ValueBound(given["index"], -count, count - 1, "an index is out of range")


def _of_rows(given: Arguments, table: str = "weight") -> Iterator[ValueBound]:
    if given[table].dim():
        yield ValueBound(given["indices"], 0, given[table].shape[0] - 1, "an index is out of range")


def _of_bags(given: Arguments) -> Iterator[ValueBound]:
    indices, offsets = given["indices"], given["offsets"]
    yield from _of_rows(given)
    if indices.dim() == 1 and offsets.dim() == 1:
        fault = "the first bag does not begin at 0"
        yield ValueBound(offsets, 0, 0, fault, RuntimeError, lambda offsets: offsets[:1])
        fault = "a bag begins before the one in front of it"
        yield ValueBound(offsets, 0, math.inf, fault, RuntimeError, lambda offsets: offsets[1:] - offsets[:-1])
        fault = "the last bag begins behind the indices"
        yield ValueBound(offsets, 0, indices.shape[0], fault, RuntimeError, lambda offsets: offsets[-1:])


def _of_labels(given: Arguments) -> Iterator[ValueBound]:
    highest = given["self"].shape[-1] - 1 if given["self"].dim() else 0
    yield ValueBound(given["target"], -1, highest, "a target is out of bounds", RuntimeError)


def _of_classes(given: Arguments) -> Iterator[ValueBound]:
    x, ignored = given["self"], given.get("ignore_index")
    if x.dim():
        prepare = None if ignored is None else lambda target: target.where(target != ignored, 0)
        yield ValueBound(
            given["target"], 0, x.shape[min(1, x.dim() - 1)] - 1, "a target is out of bounds", prepare=prepare
        )


def _of_pooled(given: Arguments) -> Iterator[ValueBound]:
    highest = math.prod(given["output_size"]) - 1
    yield ValueBound(given["indices"], 0, highest, "an index is outside of the output", RuntimeError)


def _of_probabilities(given: Arguments) -> Iterator[ValueBound]:
    for name, what in (("self", "input"), ("target", "target")):
        yield ValueBound(given[name], 0, 1, f"all elements of {what} should be between 0 and 1", RuntimeError)


def _of_divisors(given: Arguments) -> Iterator[ValueBound]:
    """Whole numbers by zero; what takes a plain number instead is looked at when it is captured."""
    x, other = given["self"], given["other"]
    if not (_is_whole(x) and _is_whole(other)) or given.get("rounding_mode", "floor") is None:
        return
    fault = "ZeroDivisionError: a whole number is divided by zero"
    if isinstance(other, Tensor):
        yield ValueBound(other, 1, 1, fault, RuntimeError, lambda other: other != 0)
    elif isinstance(other, torch.SymInt) and not is_at_least(other, 1):
        # In the dividend's dtype 256 may be a zero, of 8 bits.
        yield ValueBound(x, 1, 1, fault, RuntimeError, lambda x: _fill(x, other, x.dtype) != 0)


def _of_exponents(given: Arguments) -> Iterator[ValueBound]:
    """A number that varies; others are looked at when the call is captured."""
    x, exponent = given["self"], given["exponent"]
    if _is_whole(x) and isinstance(exponent, torch.SymInt) and not is_at_least(exponent, 0):
        fault = "Integers to negative integer powers are not allowed."
        read = partial(_fill, number=exponent, dtype=torch.int64)
        yield ValueBound(x, 0, math.inf, fault, RuntimeError, read)


def _fill(x: Tensor, number: torch.SymInt, dtype: torch.dtype) -> Tensor:
    """The number in a tensor of no dims, on the device of x."""
    return x.new_full((), number, dtype=dtype)  # type: ignore[arg-type]


def _is_whole(operand: Any) -> bool:
    if isinstance(operand, Tensor):
        return not (operand.is_floating_point() or operand.is_complex())
    return isinstance(operand, (int, torch.SymInt))


def _of_finite(given: Arguments) -> Iterator[ValueBound]:
    """A histogram between the least and the largest value."""
    x = given["self"]
    if x.is_floating_point() and given.get("min", 0) == given.get("max", 0):
        highest = torch.finfo(x.dtype).max
        yield ValueBound(x, -highest, highest, "the range of the values is not finite", RuntimeError)


def _of_sources(given: Arguments) -> Iterator[ValueBound]:
    """A mask takes as many elements as it has true values."""
    mask, count = given["mask"], given["source"].numel()
    shape = torch.broadcast_shapes(given["self"].shape, mask.shape)
    most = math.prod(shape)
    always_holds = isinstance(count, int) and isinstance(most, int) and most <= count
    if mask.dtype is torch.bool and not always_holds:
        fault = "the mask has more true values than the source has elements"
        yield ValueBound(mask, 0, count, fault, RuntimeError, lambda mask: mask.expand(shape).sum())


def _of_positives(given: Arguments, name: str = "self", highest: float = math.inf) -> Iterator[ValueBound]:
    x = given[name]
    if isinstance(x, Tensor) and x.is_floating_point():
        yield ValueBound(x, 0, highest, f"elements of {name} are not within 0 and {highest:g}", RuntimeError)


def _of_weights(given: Arguments) -> Iterator[ValueBound]:
    x = given["self"]
    if x.is_floating_point() and x.dim():
        finfo = torch.finfo(x.dtype)
        fault = "probability tensor contains either `inf`, `nan` or element < 0"
        yield ValueBound(x, 0, finfo.max, fault, RuntimeError)
        fault = "invalid multinomial distribution (sum of probabilities <= 0)"
        yield ValueBound(x, finfo.smallest_normal, math.inf, fault, RuntimeError, lambda x: x.sum(-1))


def _of_segments(given: Arguments) -> Iterator[ValueBound]:
    data, lengths = given["data"], given.get("lengths")
    if lengths is not None and not given.get("unsafe") and 0 < lengths.dim() <= data.dim():
        size = data.shape[lengths.dim() - 1]
        yield ValueBound(lengths, 0, math.inf, "lengths are negative", RuntimeError)
        fault = "the lengths do not sum to the size of the data"
        yield ValueBound(lengths, size, size, fault, RuntimeError, lambda lengths: lengths.sum(-1))


def _of_padded_rows(given: Arguments) -> Iterator[ValueBound]:
    dense, total = given["dense"], given.get("total_L")
    for offsets in given["offsets"]:
        fault = "a row is longer than dim 1 of the padded tensor"
        yield ValueBound(offsets, -math.inf, dense.shape[1], fault, RuntimeError, lambda offsets: offsets.diff())
        if total is not None:
            fault = "the last offset is not the number of all rows' elements"
            yield ValueBound(offsets, total, total, fault, RuntimeError, lambda offsets: offsets[-1:])


_BOUNDS: Mapping[str, Bounds] = {
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_reduce"), _along_dim),
    "index_fill": _of_places_and_fillings,
    "masked_fill.Tensor": _of_fillings,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), partial(_along_dim, error=RuntimeError)),
    "index": _of_dims,
    **dict.fromkeys(("index_put", "_index_put_impl"), _of_writes),
    **dict.fromkeys(("take", "put"), _of_elements),
    "embedding": _of_rows,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _of_bags),
    "embedding_renorm": partial(_of_rows, table="self"),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _of_classes),
    "multilabel_margin_loss_forward": _of_labels,
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), _of_pooled),
    "binary_cross_entropy": _of_probabilities,
    **dict.fromkeys(("floor_divide", "remainder", "fmod", "div.Tensor_mode", "div.out_mode"), _of_divisors),
    "pow.Tensor_Scalar": _of_exponents,
    "histc": _of_finite,
    "masked_scatter": _of_sources,
    **dict.fromkeys(("bernoulli.default", "bernoulli.out"), partial(_of_positives, highest=1)),
    "bernoulli.Tensor": partial(_of_positives, name="p", highest=1),
    "multinomial": _of_weights,
    "segment_reduce": _of_segments,
    "_padded_dense_to_jagged_forward": _of_padded_rows,
    "poisson": _of_positives,
    **dict.fromkeys(("normal.Tensor_Tensor", "normal.float_Tensor"), partial(_of_positives, name="std")),
}
"""By the name of an op, of which the in-place variant has another "_", or of an overload."""
