"""Buffers that a program's small arguments are copied into at each call: ten copies take less time than making one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynaxla.fx.permutations import invert_permutation
from dynaxla.isolation.forking import notify_after_fork
from dynaxla.programs.known_memory import KnownMemory
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer, Client
from dynaxla.runtime.host_padding import PaddedShape
from dynaxla.torch_api.storages import copy_all
from dynaxla.types import row_major_strides

if TYPE_CHECKING:
    from dynaxla.programs.program import Program

MOST_BYTES = 32 * 1024
"""A larger argument is not copied: its buffer shares its memory."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an argument is copied to.

    Attributes:
        position: of the argument among the caller's.
        memory: a tensor with the dims of the argument; for one that is padded, with those of what it is padded to.
        strides: of the argument's elements in that memory, if it is padded; else None.
    """

    position: int
    memory: torch.Tensor
    strides: tuple[int, ...] | None


class StagedArguments:
    """Memory for one call at a time.

    Attributes:
        buffers: one for each argument of a program that is not a weight; None for one that is made at each call.
        others: the indices of these.
    """

    __slots__ = ("_dtypes", "_places", "_shapes", "_targets", "_vectors", "buffers", "others")

    def __init__(self, client: Client, program: Program, args: Sequence[Any], values: Sequence[int]) -> None:
        places: list[_Place] = []
        self.buffers: list[Buffer] = []
        with torch.inference_mode(False), xla.load().TracebackScope():
            for position, order, padded in program.inputs:
                place, buffer = _stage(client, position, args[position], order, padded)
                if place is not None:
                    places.append(place)
                self.buffers.append(buffer)
            numbers = [] if program.cropping is None else program.cropping.vectors(values)
            self.buffers.extend(map(client.to_buffer, numbers))
        self.others = tuple(i for i, buffer in enumerate(self.buffers) if buffer is None)
        self._places = tuple(places)
        self._vectors = [each.numpy() for each in numbers]
        self._targets = [place.memory for place in places]
        self._shapes = [place.memory.shape for place in places]
        self._dtypes = [place.memory.dtype for place in places]

    def fill(self, program: Program, args: Sequence[Any], values: Sequence[int]) -> bool:
        """Copies a call's small arguments. Returns False if one is not of the shape or dtype that the program takes."""
        if self._places:
            tensors = [args[place.position] for place in self._places]
            shapes = [tensor.shape for tensor in tensors]
            if [tensor.dtype for tensor in tensors] != self._dtypes or not (
                shapes == self._shapes or self._fit(shapes)
            ):
                return False
            copy_all(self._targets, tensors)
        if self._vectors:
            assert program.cropping is not None
            for vector, numbers in zip(self._vectors, program.cropping.numbers(values), strict=True):
                vector[:] = numbers
        return True

    def _fit(self, shapes: list[torch.Size]) -> bool:
        """Has arguments of these shapes copied to the front of what they are padded to."""
        targets = []
        for place, shape in zip(self._places, shapes, strict=True):
            if place.memory.shape == shape:
                targets.append(place.memory)
            elif place.strides is None:
                return False
            else:
                targets.append(place.memory.as_strided(shape, place.strides))
        self._shapes, self._targets = shapes, targets
        return True


def _stage(
    client: Client, position: int, tensor: torch.Tensor, order: Sequence[int] | None, padded: PaddedShape | None
) -> tuple[_Place | None, Buffer | None]:
    """Memory for an argument, and the buffer of it; None for one that is large or empty, or whose buffer shares no memory."""
    dims = list(range(tensor.dim())) if order is None else list(order)
    sizes = tuple(tensor.shape[dim] for dim in dims) if padded is None else padded.sizes
    made = torch.empty(sizes, dtype=tensor.dtype)
    if not 0 < made.nbytes <= MOST_BYTES:
        return None, None
    buffer = client.to_buffer(made)
    if not client.shares_memory(buffer, made):
        return None, None
    back = invert_permutation(dims)
    strides = None if padded is None else tuple(row_major_strides(sizes)[dim] for dim in back)
    return _Place(position, made.permute(back), strides), buffer


class StagingPool:
    """The staged arguments of one program, which is as many as it ever had calls at the same time.

    Only for programs whose runs end before `Executable.run` returns: the memory is written again for the next call.

    Attributes:
        free: those that no call uses.
        known: buffers of memory that arguments had in earlier calls; None until the first call, and for a program that pads.
    """

    def __init__(self) -> None:
        self.free: list[StagedArguments] = []
        self.known: KnownMemory | None = None
        notify_after_fork(self)

    def after_fork(self) -> None:
        self.free = []  # the buffers belong to the parent's client
