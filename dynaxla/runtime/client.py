"""The protocols of devices, compilers and executables that the rest of the package uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from dynaxla.options import Limits
from dynaxla.runtime.executable_info import MemoryUse
from dynaxla.runtime.padding import PaddedShape

Buffer = Any
"""A device buffer, opaque above `runtime`: `Client.to_buffer` makes it, `Executable.run` takes it."""


class Compiled(Protocol):
    """A compiled program that may or may not be loaded on a device."""

    def hlo_text(self) -> str: ...

    def memory_use(self) -> MemoryUse: ...

    def cost(self) -> dict[str, float]: ...

    def serialized(self) -> bytes | None:
        """The executable in bytes that `Client.load` takes in another process; None if the platform cannot serialize it."""
        ...


class Executable(Compiled, Protocol):
    """A compiled program, loaded and ready to run on its client's device."""

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Submits the program; may return before the results are computed."""
        ...


class HeldWeights(Protocol):
    """The weights of a part on the device, see `weight_residency.Residency`."""

    def buffers(self, weights: Sequence[torch.Tensor]) -> list[Buffer]: ...


class Client(Protocol):
    """One device of one platform."""

    platform: str
    """JAX's name of the platform that programs are lowered for: "cpu", "cuda", "tpu", or a plugin's name."""

    def prepare(self) -> None:
        """Announces that a module will be compiled soon, so that a compiler that starts slowly can be started."""
        ...

    def compile(self, module: bytes, limits: Limits) -> Executable:
        """Compiles a StableHLO module. Raises CompileError if XLA refuses it or, in a child, crashes or exceeds a limit."""
        ...

    def load(self, serialized: bytes) -> Executable:
        """Loads an executable that a client of the same identity serialized. Raises CompileError if it cannot be loaded."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Everything about the device and its compiler that affects the compiled program, for cache keys."""
        ...

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        """Makes a buffer of a contiguous tensor; the two share memory if the platform allows."""
        ...

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        """Whether the buffer made from `tensor` reads the tensor's own memory."""
        ...

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        """Returns a tensor that owns the buffer's memory, or a host copy of it."""
        ...

    def hold(self, watch: Any, held: Any) -> HeldWeights:
        """Makes the object that keeps the weights of a part on the device.

        Args:
            watch: the process's `weight_residency.WriteWatch`.
            held: the part's `weight_residency.Held`.
        """
        ...


class OnDevice(ABC):
    """Additional methods of a client whose tensors are stored in PJRT buffers."""

    @abstractmethod
    def to_padded(self, tensor: torch.Tensor, padded: PaddedShape) -> Buffer:
        """Makes a buffer of a larger shape with `tensor` at the front of each dim; the other elements are undefined."""

    @abstractmethod
    def cropped(self, tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor | None:
        """Crops a program's result to the front of each dim; the copy may be delayed until the tensor is read.

        Args:
            sizes, strides: of the cropped tensor in torch, in the result's order of dims.

        Returns:
            The tensor; None if the strides have another order of dims.
        """

    @abstractmethod
    def run_donating(self, program: Any, args: Sequence[Any], buffers: list[Buffer]) -> list[torch.Tensor]:
        """Runs a program that donates arguments' buffers to results; these arguments then have the new values.

        Args:
            program: a `programs.Program`.
            args: the caller's arguments.
            buffers: the executable's arguments.

        Returns:
            The results; the updated argument for each result that is an argument's new value.
        """


class CompileOnlyClient(Protocol):
    """A compiler for a device that may be absent; every client of a live device is one, too."""

    platform: str

    def compile(self, module: bytes, limits: Limits) -> Compiled:
        """Compiles a module. Raises CompileError if the compiler refuses it, crashes, or takes too much time or memory."""
        ...

    def identity(self) -> Mapping[str, str]:
        """The identity that a client of the device returns, for cache keys."""
        ...
