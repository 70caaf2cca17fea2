"""Buffers of memory that earlier calls' arguments had, by address: a call whose arguments lie there copies nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from dynaxla.isolation.forking import notify_after_fork
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer, Client
from dynaxla.runtime.weight_residency import make_picker
from dynaxla.torch_api.storages import borrow_memory, data_address, is_plain, make_check
from dynaxla.types import row_major_strides

if TYPE_CHECKING:
    from dynaxla.programs.program import Program

MOST_ADDRESSES = 8
"""Of one argument, of which there are buffers, and of which it is known that a call had them lately."""

MOST_MISFITS = 16
"""Calls with other tensors than those that are expected, until tensors like theirs are."""


class _Expected:
    """What a call's arguments are expected to be, and the buffers of memory that such ones had.

    Attributes:
        fits: whether tensors are as expected.
        buffers: for each argument, by address.
        missed: for each argument the addresses that missed a buffer lately.
    """

    __slots__ = ("buffers", "fits", "missed")

    def __init__(self, fits: Callable[..., bool], arguments: int) -> None:
        self.fits = fits
        self.buffers: list[dict[int, Buffer]] = [{} for _ in range(arguments)]
        self.missed: list[deque[int]] = [deque(maxlen=MOST_ADDRESSES) for _ in range(arguments)]


class KnownMemory:
    """The memory of the arguments of one program that is read as it lies: none is padded.

    A buffer owns no memory. It is only read in runs that end before `Executable.run` returns, by calls whose argument lies at
    its address; so it may outlive what lay there. Memory gets a buffer when it misses one for the second time within some
    calls: PyTorch's allocator gives a loop the same memory again, and where it does not, no buffers are made in vain.
    """

    __slots__ = ("__weakref__", "_client", "_expected", "_misfits", "_orders", "_pick")

    def __init__(self, client: Client, program: Program) -> None:
        self._client = client
        self._pick = make_picker([position for position, _, _ in program.inputs])
        self._orders = [order for _, order, _ in program.inputs]
        self.after_fork()
        notify_after_fork(self)

    def after_fork(self) -> None:
        self._misfits = MOST_MISFITS  # the next call says what is expected
        self._expected = _Expected(lambda *tensors: False, 0)  # buffers belong to the parent's client

    def find(self, args: Sequence[Any]) -> list[Buffer] | None:
        """The buffers of a call's arguments that are no weights; None if one has other memory than calls before, or is another
        kind of tensor. Several threads may call it."""
        expected, tensors = self._expected, self._pick(args)
        if not expected.fits(*tensors):
            self._expect(tensors)
            return None
        try:
            return list(map(getitem, expected.buffers, map(data_address, tensors)))  # no bytecode of Python's for each
        except KeyError:
            self._note(expected, tensors)
        return None

    def _expect(self, tensors: Sequence[Any]) -> None:
        """Expects tensors like these from now on, if the expected ones did not come for some calls."""
        self._misfits += 1
        if self._misfits >= MOST_MISFITS:
            self._misfits = 0
            if all(map(_is_dense, tensors, self._orders)):
                self._expected = _Expected(make_check(tensors), len(tensors))

    def _note(self, expected: _Expected, tensors: Sequence[torch.Tensor]) -> None:
        """Makes buffers of memory that missed one before."""
        places = zip(expected.buffers, expected.missed, tensors, self._orders, strict=True)
        for known, missed, tensor, order in places:
            address = data_address(tensor)
            if address in known:
                continue
            if address not in missed:
                missed.append(address)
            elif (buffer := self._make(tensor, order)) is not None:
                if len(known) >= MOST_ADDRESSES:
                    known.clear()
                known[address] = buffer

    def _make(self, tensor: torch.Tensor, order: Sequence[int] | None) -> Buffer | None:
        """A buffer of a tensor's memory; None if PJRT would copy it."""
        sizes = tuple(tensor.shape[dim] for dim in order or range(tensor.dim()))
        with torch.inference_mode(False), xla.load().TracebackScope():
            memory = borrow_memory(data_address(tensor), sizes, row_major_strides(sizes), tensor.dtype)
            buffer = self._client.to_buffer(memory)
            return buffer if self._client.shares_memory(buffer, memory) else None


def _is_dense(tensor: Any, order: Sequence[int] | None) -> bool:
    """Whether an argument's elements are what lies in its memory, row by row once its dims are permuted."""
    if not is_plain(tensor) or tensor.numel() == 0:
        return False
    return (tensor if order is None else tensor.permute(order)).is_contiguous()  # type: ignore[no-any-return]
