"""What the rest of the package asks of a device: protocols only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from dynaxla.options import Limits
from dynaxla.runtime.executable_info import MemoryUse

Buffer = Any
"""A device buffer. Opaque above `runtime`: made by `Client.to_buffer`, consumed by `Executable.run`."""


class Compiled(Protocol):
    """A compiled program that may or may not be loaded on a device."""

    def hlo_text(self) -> str: ...

    def memory_use(self) -> MemoryUse: ...

    def cost(self) -> dict[str, float]: ...

    def serialized(self) -> bytes | None:
        """What `Client.load` takes in another process; None where the platform cannot serialize it."""
        ...


class Executable(Compiled, Protocol):
    """A compiled program, loaded and ready to run on its client's device."""

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Submits the program; the results may still be under way when it returns."""
        ...


class HeldWeights(Protocol):
    """The weights of a part on the device, see `weight_residency.Residency`."""

    def buffers(self, weights: Sequence[torch.Tensor]) -> list[Buffer]: ...


class Client(Protocol):
    """One device of one platform."""

    platform: str
    """JAX's name of the platform, which programs are lowered for: "cpu", "cuda", "tpu", or a plugin's own."""

    def prepare(self) -> None:
        """Says that a module will be compiled soon: a compiler that takes long to start may begin with it."""
        ...

    def compile(self, module: bytes, limits: Limits) -> Executable:
        """Raises CompileError if XLA refuses the module or, on platforms that compile in a child, harms the child."""
        ...

    def load(self, serialized: bytes) -> Executable:
        """Loads what an executable of a client of the same identity gave. Raises CompileError if it cannot be loaded."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Everything about the device and its compiler on which it depends what a module is compiled to."""
        ...

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        """A buffer with the values of a contiguous tensor; shares its memory where the platform allows."""
        ...

    def shares_memory(self, buffer: Buffer, tensor: torch.Tensor) -> bool:
        """Whether the buffer made from `tensor` reads the tensor's own memory."""
        ...

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        """A tensor that owns the buffer's memory, or a host copy of it."""
        ...


class DeviceTensors(ABC):
    """A client whose buffers are those of torch tensors: the arguments of a call are bound without a copy."""

    @abstractmethod
    def make_binder(self, weights: Sequence[int], held: Any) -> Any:
        """The `programs.argument_binder.ArgumentBinder` of a part.

        Args:
            weights: positions of its weights.
            held: the part's `weight_residency.Held`.
        """


class CompileOnlyClient(Protocol):
    """A compiler for a device that need not be here; every client of a live device is one, too."""

    platform: str

    def compile(self, module: bytes, limits: Limits) -> Compiled:
        """Raises CompileError if the compiler refuses the module, dies of it, or takes too long or too much memory."""
        ...

    def identity(self) -> Mapping[str, str]:
        """What a client of such a device says of itself: a program is found by it."""
        ...
