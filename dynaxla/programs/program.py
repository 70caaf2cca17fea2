"""What a part is at one set of sizes or at one bucket: compiled, and as its calls take it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaxla.bucketing.cropping import Cropping
from dynaxla.programs.staged_arguments import StagingPool
from dynaxla.runtime.client import Executable
from dynaxla.runtime.host_padding import PaddedShape
from dynaxla.runtime.loaded_executables import SynchronousExecutable
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
        gives_results: whether the outputs are the executable's results as they are.
        staging: memory for small arguments; None where a run may read arguments after `Executable.run` has returned.
    """

    executable: Executable | None
    inputs: tuple[tuple[int, tuple[int, ...] | None, PaddedShape | None], ...]
    outputs: tuple[OutputSource, ...]
    cropping: Cropping | None = None
    donated: tuple[DonatedArgument, ...] = ()
    gives_results: bool = field(init=False)
    staging: StagingPool | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        plain = tuple(OutputSource(result=i) for i in range(len(self.outputs)))
        object.__setattr__(self, "gives_results", self.executable is not None and self.outputs == plain)
        ends = isinstance(self.executable, SynchronousExecutable)
        object.__setattr__(self, "staging", StagingPool() if ends else None)


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
