"""Arguments that eager PyTorch may refuse: writes that overlap other operands, and values that are out of range
(ops/value_bounds.py has the ranges).

A call that looks so runs on the host, where eager raises its own error, or computes what it computes. Where the client's
memory is the host's, values are looked at before the call. Elsewhere that would wait for the device: the range of the values
is computed there, and looked at when the host next reads a tensor, so that the error comes late, as CUDA's does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dynaxla.device.call_queue import WaitingCall
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.lazy_buffer import LazyBuffer
from dynaxla.device.storage import storage_of
from dynaxla.errors import ExecutionError
from dynaxla.fx.permutations import is_dense
from dynaxla.ops.value_bounds import ValueBound, bounds_of
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import download, host_view
from dynaxla.torch_api.frames import user_line
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.torch_api.pytree import tree_leaves

_SORTS = (torch.ops.aten.sort.values, torch.ops.aten.sort.values_stable)

MOST_PLACES = 16
"""Of one memory, whose ranges are kept: a loop may index by every window of a permutation."""

MOST_CATEGORIES = 1 << 24
"""Of which eager PyTorch draws."""

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

    bound: ValueBound
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
        find_bounds, leaves = bounds_of(known.name), _reason_to_leave(known.name)
        if find_bounds is None and leaves is None:
            return False
        given = dict(zip(known.names, args, strict=False)) | dict(kwargs)
        if leaves is not None and leaves(given):
            return True
        return find_bounds is not None and any(self._is_broken(bound, known) for bound in find_bounds(given))

    def _is_broken(self, bound: ValueBound, known: FunctionalForm) -> bool:
        """Whether values that need not be waited for are out of range."""
        if bound.values.numel() == 0 or bound.values.is_complex():
            return False
        values = self._available(bound.values)
        if values is None:
            ends = self._found_before(bound, known)
        else:
            least, largest = bound.find_ends(values)
            ends = least.item(), largest.item()
        return ends is not None and not bound.allows(*ends)

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
        if not self._client.shares_host_memory or memory.spec.dtype is not tensor.dtype:
            return None
        if type(held := memory.held) is LazyBuffer:
            held = memory.buffer if type(held.trace) is WaitingCall else held.known
        if held is None:
            return None
        try:
            array = host_view(self._client, held)
        except ExecutionError as error:
            raise memory.make_error(error) from error
        return array.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _found_before(self, bound: ValueBound, known: FunctionalForm) -> tuple[float, float] | None:
        """The ends of the values that an earlier call waited for; else None, and the device computes them."""
        if storage_of(bound.values).is_empty:
            return None
        found = self._range_of(bound)
        if found.ends is None:
            if len(self._pending) >= MOST_PENDING:
                self._check_oldest()
            self._pending.append(_PendingRange(bound, found, known.name + user_line()))
        return found.ends

    def _range_of(self, bound: ValueBound) -> _FoundRange:
        """What the device computes; once for values that several ops take, until they are written."""
        values = bound.values
        memory = storage_of(values)
        place = values.dtype, values.shape, values.stride(), values.storage_offset()
        found = None if bound.prepare is not None or memory.ranges is None else memory.ranges.get(place)
        if found is None:
            held = memory.held
            found = _FoundRange(*bound.find_ends(values))
            if bound.prepare is None and memory.held is held:
                known = memory.ranges or {}
                memory.ranges = {**(known if len(known) < MOST_PLACES else {}), place: found}
        return found

    def _check_oldest(self) -> None:
        try:
            pending = self._pending.popleft()
        except IndexError:
            return  # another thread took it
        least, largest = pending.found.wait(self._client)
        bound = pending.bound
        if not bound.allows(least, largest):
            found = least if least < bound.lowest else largest
            raise bound.error(
                f"{pending.made_by}: an index, a count or a number is {found}; {bound.lowest} to {bound.highest} are "
                "allowed (found by the device while it ran; the results of the call have any values)"
            )


def _writes_other_count(given: Mapping[str, Any]) -> bool:
    """`put` with an index too few or too many, or one whose order torch is asked to keep."""
    is_refused = torch.are_deterministic_algorithms_enabled() and not given.get("accumulate")
    return is_refused or bool(given["index"].numel() != given["source"].numel())


def _has_gaps(given: Mapping[str, Any]) -> bool:
    """torch's gradient takes the factors of a matrix with gaps for other ones, and a program reads it without gaps."""
    return not given["A"].is_contiguous()


def _has_many_categories(given: Mapping[str, Any]) -> bool:
    shape: torch.Size = given["self"].shape
    return len(shape) > 0 and shape[-1] > MOST_CATEGORIES


_LEFT_TO_HOST: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "put": _writes_other_count,
    "put_": _writes_other_count,
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet"), _has_gaps),
    "multinomial": _has_many_categories,
}
"""By the name of an op, for what arguments eager refuses it whatever the values are, or computes it otherwise."""


@cache
def _reason_to_leave(name: str) -> Callable[[Mapping[str, Any]], bool] | None:
    return _LEFT_TO_HOST.get(name.split(".")[1]) if name.startswith("aten.") else None
