"""Arguments that eager PyTorch may refuse: writes that overlap other operands, and values that are out of range.

A call that looks so runs on the host, where eager raises its own error, or computes what it computes. Where the client's
memory is the host's, values are looked at before the call. Elsewhere that would wait for the device: the range of the values
is computed there, and looked at when the host next reads a tensor, so that the error comes late, as CUDA's does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.lazy_buffer import LazyBuffer
from dynaxla.device.storage import storage_of
from dynaxla.errors import ExecutionError
from dynaxla.fx.permutations import is_dense
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import download, host_view
from dynaxla.torch_api.frames import user_line
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.torch_api.pytree import tree_leaves

_SORTS = (torch.ops.aten.sort.values, torch.ops.aten.sort.values_stable)

MOST_PLACES = 16
"""Of one memory, whose ranges are kept: a loop may index by every window of a permutation."""

MOST_PENDING = 256
"""Ranges that are not yet looked at. Further calls wait for the oldest one, whose run has long been done."""


def overlaps_operand(known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor that an op writes to shares elements with another operand, as far as eager PyTorch looks for that.

    Eager's rule is that of torch's `get_overlap_status`: it compares dense tensors alone. Operands that are the written tensor
    itself count for ops that are not pointwise, but for sorts: eager's on the host orders equal elements otherwise.
    """
    written, read = list[torch.Tensor](), list[torch.Tensor]()
    for name, value in (*zip(known.names, args, strict=False), *kwargs.items()):
        tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        (written if name in known.written else read).extend(tensors)
    takes_itself = torch.Tag.pointwise in known.op.tags or "_foreach_" in known.name or known.op in _SORTS
    return any(_overlap(one, other, takes_itself) for one in written for other in read)


def _overlap(one: torch.Tensor, other: torch.Tensor, takes_itself: bool) -> bool:
    memory = get_attached_memory(one.untyped_storage())
    if memory is None or memory is not get_attached_memory(other.untyped_storage()):
        return False
    if not (one.numel() and other.numel() and is_dense(one) and is_dense(other)):
        return False
    (first, end), (other_first, other_end) = _extent(one), _extent(other)
    if (first, end) == (other_first, other_end) and one.stride() == other.stride():
        return not takes_itself
    return first < other_end and other_first < end


def _extent(dense: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a dense tensor has."""
    first = int(dense.storage_offset()) * dense.itemsize
    return first, first + dense.numel() * dense.itemsize


@dataclass(frozen=True, slots=True)
class AllowedRange:
    """What eager PyTorch requires of the values of a tensor.

    Attributes:
        values: the tensor.
        lowest, highest: the range, ends included.
        error: the class of eager's error.
        prepare: computes what must lie in the range of the values, on any device; None: they themselves.
    """

    values: torch.Tensor
    lowest: float
    highest: float
    error: type[Exception] = IndexError
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None

    def compute(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the largest of what must lie in the range, of `self.values` on any device."""
        return torch.aminmax(values if self.prepare is None else self.prepare(values))

    def has(self, least: float, largest: float) -> bool:
        return self.lowest <= least and largest <= self.highest


_REFUSED = AllowedRange(torch.zeros((), dtype=torch.int64, device="cpu"), 1, 0)
"""What no value has: of a call that eager refuses whatever the values are, or that is left to it for another reason."""


class _FoundRange:
    """The least and the largest of what must lie in a range, which the device computes.

    Attributes:
        ends: what they are, once they were waited for.
    """

    __slots__ = ("_there", "ends")

    def __init__(self, least: torch.Tensor, largest: torch.Tensor) -> None:
        self._there: tuple[torch.Tensor, ...] = (least, largest)
        self.ends: tuple[float, float] | None = None

    def wait(self, client: PjrtClient) -> tuple[float, float]:
        """The ends. Waits for the device."""
        there = self._there
        if self.ends is None:
            least, largest = (download(client, storage_of(each).buffers[0]).item() for each in there)
            self.ends, self._there = (least, largest), ()
        return self.ends


@dataclass(frozen=True, slots=True)
class _PendingRange:
    """A range that is to be looked at, and the call that it is of."""

    allowed: AllowedRange
    found: _FoundRange
    made_by: str


class ValueChecks:
    """Checks the values of index tensors and the like."""

    def __init__(self, client: PjrtClient) -> None:
        self._client = client
        self._pending: deque[_PendingRange] = deque()

    def is_refused(self, known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether values are out of range. Of values that would have to be waited for the range is computed by the device.

        Raises:
            IndexError, RuntimeError: those of an earlier call were.
        """
        check = check_of(known.name)
        if check is None:
            return False
        given = dict(zip(known.names, args, strict=False)) | dict(kwargs)
        for allowed in check(given):
            if allowed.values.numel() == 0 or allowed.values.is_complex():
                continue
            values = self._available(allowed.values)
            if values is None:
                ends = self._found_before(allowed, known)
            else:
                least, largest = allowed.compute(values)
                ends = least.item(), largest.item()
            if ends is not None and not allowed.has(*ends):
                return True
        return False

    def raise_failed(self) -> None:
        """Waits for the ranges that the device computes.

        Raises:
            IndexError, RuntimeError: values were out of range.
        """
        while self._pending:
            self._check_oldest()

    def _available(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor's values, on the host, without a copy; None if they would have to be waited for."""
        if tensor.device.type == "cpu":
            return tensor
        memory = storage_of(tensor)
        held = memory.held
        if type(held) is LazyBuffer:
            held = held.known
        if held is None or not self._client.shares_host_memory or memory.spec.dtype is not tensor.dtype:
            return None
        try:
            array = host_view(self._client, held)
        except ExecutionError as error:
            raise memory.make_error(error) from error
        return array.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _found_before(self, allowed: AllowedRange, known: FunctionalForm) -> tuple[float, float] | None:
        """The ends of the values that an earlier call waited for; else None, and the device computes them."""
        if storage_of(allowed.values).is_empty:
            return None
        found = self._range_of(allowed)
        if found.ends is None:
            if len(self._pending) >= MOST_PENDING:
                self._check_oldest()
            self._pending.append(_PendingRange(allowed, found, known.name + user_line()))
        return found.ends

    def _range_of(self, allowed: AllowedRange) -> _FoundRange:
        """What the device computes; once for values that several ops take, until they are written."""
        values = allowed.values
        memory = storage_of(values)
        place = values.dtype, values.shape, values.stride(), values.storage_offset()
        found = None if allowed.prepare is not None or memory.ranges is None else memory.ranges.get(place)
        if found is None:
            held = memory.held
            found = _FoundRange(*allowed.compute(values))
            if allowed.prepare is None and memory.held is held:
                known = memory.ranges or {}
                memory.ranges = {**(known if len(known) < MOST_PLACES else {}), place: found}
        return found

    def _check_oldest(self) -> None:
        try:
            pending = self._pending.popleft()
        except IndexError:
            return  # another thread took it
        least, largest = pending.found.wait(self._client)
        allowed = pending.allowed
        if not allowed.has(least, largest):
            found = least if least < allowed.lowest else largest
            raise allowed.error(
                f"{pending.made_by}: an index, a count or a number is {found}; {allowed.lowest} to {allowed.highest} are "
                "allowed (found by the device while it ran; the results of the call have any values)"
            )


Check = Callable[[Mapping[str, Any]], Iterator[AllowedRange]]
"""Takes an op's arguments by name."""


@cache
def check_of(name: str) -> Check | None:
    """The check of an overload, "aten.index_add_.default"."""
    namespace, packet, overload = name.split(".")
    packet = packet.removesuffix("_")
    return _CHECKS.get(f"{packet}.{overload}", _CHECKS.get(packet)) if namespace == "aten" else None


def _along_dim(
    given: Mapping[str, Any], error: type[Exception] = IndexError, wraps: bool = False
) -> Iterator[AllowedRange]:
    x, dim = given["self"], given["dim"]
    if isinstance(dim, int) and -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        size = x.shape[dim] if x.dim() else 1
        yield AllowedRange(given["index"], -size if wraps else 0, size - 1, error)


def _of_dims(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    indices = given["indices"]
    are_numbers = all(index is None or index.dtype in (torch.int64, torch.int32) for index in indices)
    if are_numbers:  # a mask may have several dims
        for size, index in zip(given["self"].shape, indices, strict=False):
            if index is not None:
                yield AllowedRange(index, -size, size - 1)


def _of_fillings(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    """A number, in a tensor of no dims, that is written as a plain one: the dtype must hold it. Only floats hold infinities."""
    dtype, value = given["self"].dtype, given["value"]
    if torch.bool in (dtype, value.dtype) or dtype is value.dtype or dtype.is_complex:
        return
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        yield AllowedRange(value, limits.min if limits.min < 0 else -limits.max, limits.max, RuntimeError)
    elif not (value.dtype.is_floating_point and torch.finfo(value.dtype).max <= torch.finfo(dtype).max):
        highest = torch.finfo(dtype).max
        prepare = (lambda value: value.where(value.isfinite(), 0)) if value.dtype.is_floating_point else None
        yield AllowedRange(value, -highest, highest, RuntimeError, prepare)


def _index_fill(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    if isinstance(given["value"], torch.Tensor):
        yield from _of_fillings(given)
    yield from _along_dim(given, wraps=True)


def _of_elements(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    count = given["self"].numel()
    yield AllowedRange(given["index"], -count, count - 1)


def _put(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    is_refused = torch.are_deterministic_algorithms_enabled() and not given.get("accumulate")
    if is_refused or given["index"].numel() != given["source"].numel():
        yield _REFUSED
    yield from _of_elements(given)


def _of_rows(given: Mapping[str, Any], table: str = "weight") -> Iterator[AllowedRange]:
    if given[table].dim():
        yield AllowedRange(given["indices"], 0, given[table].shape[0] - 1)


def _of_bags(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    indices, offsets = given["indices"], given["offsets"]
    yield from _of_rows(given)
    if indices.dim() == 1 and offsets.dim() == 1:
        yield AllowedRange(offsets[:1], 0, 0, RuntimeError)
        yield AllowedRange(offsets[-1:], 0, indices.shape[0], RuntimeError)


def _of_labels(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    yield AllowedRange(given["target"], -1, given["self"].shape[-1] - 1 if given["self"].dim() else 0, RuntimeError)


def _of_pooled(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    yield AllowedRange(given["indices"], 0, math.prod(given["output_size"]) - 1, RuntimeError)


def _of_probabilities(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    for name in ("self", "target"):
        yield AllowedRange(given[name], 0, 1, RuntimeError)


def _of_divisors(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    """Whole numbers by zero; what takes a plain number instead is looked at when it is captured."""
    x, other = given["self"], given["other"]
    tensors = [each for each in (x, other) if isinstance(each, torch.Tensor)]
    is_whole = not any(each.is_floating_point() or each.is_complex() for each in tensors)
    if is_whole and isinstance(other, torch.Tensor) and given.get("rounding_mode", "floor") is not None:
        yield AllowedRange(other, 1, 1, RuntimeError, lambda other: other != 0)


def _histc(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    x = given["self"]
    if x.is_floating_point() and given.get("min", 0) == given.get("max", 0):
        highest = torch.finfo(x.dtype).max
        yield AllowedRange(x, -highest, highest, RuntimeError)


def _determinant(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    """torch's gradient takes the factors of a matrix with gaps for other ones, and a program reads it without gaps."""
    if not given["A"].is_contiguous():
        yield _REFUSED


def _of_classes(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    x, ignored = given["self"], given.get("ignore_index")
    if x.dim():
        prepare = None if ignored is None else lambda target: target.where(target != ignored, 0)
        yield AllowedRange(given["target"], 0, x.shape[min(1, x.dim() - 1)] - 1, prepare=prepare)


def _masked_scatter(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    x, mask, count = given["self"], given["mask"], given["source"].numel()
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    if mask.dtype is torch.bool and count < shape.numel():
        yield AllowedRange(mask, 0, count, RuntimeError, lambda mask: mask.expand(shape).sum())


def _of_floats(given: Mapping[str, Any], name: str = "self", highest: float = math.inf) -> Iterator[AllowedRange]:
    x = given[name]
    if x.is_floating_point():
        yield AllowedRange(x, 0, min(highest, torch.finfo(x.dtype).max), RuntimeError)


def _multinomial(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    x = given["self"]
    if x.dim() and x.shape[-1] > 2**24:
        yield _REFUSED
    if x.is_floating_point() and x.dim():
        finfo = torch.finfo(x.dtype)
        yield AllowedRange(x, 0, finfo.max, RuntimeError)
        yield AllowedRange(x, finfo.smallest_normal, math.inf, RuntimeError, lambda x: x.sum(-1))


def _lengths_of_segments(given: Mapping[str, Any]) -> Iterator[AllowedRange]:
    data, lengths = given["data"], given.get("lengths")
    if lengths is not None and not given.get("unsafe") and 0 < lengths.dim() <= data.dim():
        size = data.shape[lengths.dim() - 1]
        yield AllowedRange(lengths, 0, math.inf, RuntimeError)
        yield AllowedRange(lengths, size, size, RuntimeError, lambda lengths: lengths.sum(-1))


_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_reduce"), _along_dim),
    "index_fill": _index_fill,
    "masked_fill.Tensor": _of_fillings,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), partial(_along_dim, error=RuntimeError)),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _of_dims),
    "take": _of_elements,
    "put": _put,
    "embedding": _of_rows,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _of_bags),
    "embedding_renorm": partial(_of_rows, table="self"),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _of_classes),
    "multilabel_margin_loss_forward": _of_labels,
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), _of_pooled),
    "binary_cross_entropy": _of_probabilities,
    **dict.fromkeys(("floor_divide", "remainder", "fmod", "div.Tensor_mode", "div.out_mode"), _of_divisors),
    "histc": _histc,
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet"), _determinant),
    "masked_scatter": _masked_scatter,
    **dict.fromkeys(("bernoulli.default", "bernoulli.out"), partial(_of_floats, highest=1)),
    "bernoulli.Tensor": partial(_of_floats, name="p", highest=1),
    "multinomial": _multinomial,
    "segment_reduce": _lengths_of_segments,
    "poisson": _of_floats,
    **dict.fromkeys(("normal.Tensor_Tensor", "normal.float_Tensor"), partial(_of_floats, name="std")),
}
"""By the name of an op, of which the in-place variant has another "_", or of an overload."""
