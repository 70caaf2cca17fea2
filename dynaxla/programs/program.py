"""What a part is at one set of sizes or at one bucket: compiled, and as its calls take it."""

from __future__ import annotations

from dataclasses import dataclass

from dynaxla.bucketing.cropping import Cropping
from dynaxla.runtime.client import Executable
from dynaxla.runtime.host_padding import PaddedShape
from dynaxla.types import OutputSource


@dataclass(frozen=True, slots=True)
class DonatedArgument:
    """An argument whose memory an executable takes for its new value.

    Attributes:
        position: of the tensor among the caller's arguments.
        argument: of the executable.
        result: its new value.
        order: permutes the result to the tensor's dims; None: it has them.
    """

    position: int
    argument: int
    result: int
    order: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Program:
    """A part at one set of sizes or at one bucket, compiled.

    Attributes:
        executable: None if every output is an argument or a plain value: nothing to compute, nothing compiled.
        inputs: for every argument that is not resident: its position, the permutation that makes it row-major, and what
            the result of that is padded to.
        outputs: where each output of the part comes from.
        cropping: what is real of the outputs; None where nothing is padded.
        donated: arguments whose memory the executable takes for their new values; outputs name these by the argument.
    """

    executable: Executable | None
    inputs: tuple[tuple[int, tuple[int, ...] | None, PaddedShape | None], ...]
    outputs: tuple[OutputSource, ...]
    cropping: Cropping | None = None
    donated: tuple[DonatedArgument, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramMetadata:
    """What is known of a part at one bucket or at one set of sizes beside its executable.

    Attributes:
        orders: for each argument of the executable the permutation that makes the caller's tensor row-major, or None.
        outputs: where each output of the part comes from.
        shapes: what the free tensors are padded to; empty where nothing is padded.
        cropping: what is real of the outputs; None where nothing is padded.
        donated: the arguments of the executable whose memory it takes, each with the result that is the new value.
    """

    orders: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[OutputSource, ...]
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    cropping: Cropping | None = None
    donated: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A part at one bucket or at one set of sizes, compiled in whatever process.

    Attributes:
        executable: None if there is nothing to compute.
    """

    executable: Executable | None
    outline: ProgramMetadata
