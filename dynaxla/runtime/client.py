"""The protocols of devices, compilers and executables that the rest of the package uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from dynaxla.options import Limits
from dynaxla.runtime.executable_info import MemoryUse

Buffer = Any
"""A device buffer, opaque above `runtime`: `Client.to_buffer` makes it, `Executable.run` takes it."""


class CompiledModule(Protocol):
    """A compiled program that may or may not be loaded on a device."""

    def hlo_text(self) -> str: ...

    def memory_use(self) -> MemoryUse: ...

    def cost(self) -> dict[str, float]: ...

    def serialize(self) -> bytes | None:
        """The executable in bytes that `Client.load` takes in another process; None if the platform cannot serialize it."""
        ...


class Executable(CompiledModule, Protocol):
    """A compiled program, loaded and ready to run on its client's device."""

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Submits the program; may return before the results are computed."""
        ...


HOST_ALIGNMENT = 64
"""The bytes to which PJRT wants host memory aligned that a buffer shares."""


class HeldWeights(Protocol):
    """The weights of a part on the device, see `weight_residency.WeightResidency`."""

    def buffers(self, weights: Sequence[torch.Tensor]) -> list[Buffer]: ...


class Client(Protocol):
    """One device of one platform."""

    platform: str
    """JAX's name of the platform that programs are lowered for: "cpu", "cuda", "tpu", or a plugin's name."""

    shares_host_memory: bool
    """Whether `to_buffer` shares the memory of a host tensor that is aligned to `HOST_ALIGNMENT`; else it copies each."""

    mesh_devices: Any
    """`mesh_devices.MeshDevices`, by which its programs are sharded; None where that cannot be."""

    def prepare(self) -> None:
        """Announces that a module will be compiled soon, so that a compiler that starts slowly can be started."""
        ...

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> Executable:
        """Compiles a StableHLO module, which is partitioned over so many devices.

        Raises CompileError if XLA refuses it or, in a child, crashes or exceeds a limit.
        """
        ...

    def load(self, serialized: bytes, partitions: int = 1) -> Executable:
        """Loads an executable for so many devices that a client of the same identity serialized.

        Raises CompileError if it cannot be loaded.
        """
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


class DeviceTensors(ABC):
    """A client whose buffers are those of torch tensors: the arguments of a call are bound without a copy."""

    @abstractmethod
    def make_binder(self, weights: Sequence[int], held: Any) -> Any:
        """The `programs.argument_binder.ArgumentBinder` of a part.

        Args:
            weights: positions of its weights.
            held: the part's `weight_residency.PartWeights`.
        """


class CompileOnlyClient(Protocol):
    """A compiler for a device that may be absent; every client of a live device is one, too."""

    platform: str

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> CompiledModule:
        """Compiles a module, which is partitioned over so many devices.

        Raises CompileError if the compiler refuses it, crashes, or takes too much time or memory.
        """
        ...

    def identity(self) -> Mapping[str, str]:
        """The identity that a client of the device returns, for cache keys."""
        ...
