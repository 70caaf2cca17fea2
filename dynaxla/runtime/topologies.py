"""PJRT topologies: compilers for absent devices. They are native code, so they run in a child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynaxla.errors import CompileError
from dynaxla.isolation.children import ChildProcess
from dynaxla.mesh import Mesh, Sharding
from dynaxla.options import Limits
from dynaxla.runtime import xla
from dynaxla.runtime.client import CompiledModule
from dynaxla.runtime.compile_worker import request_compile
from dynaxla.runtime.executable_info import CompileRejected, MemoryUse
from dynaxla.runtime.loaded_executables import PjrtExecutable, compress_executable
from dynaxla.runtime.topology_worker import TopologyDescription, TopologyExecutable, TopologyRequest, make_grid

_START = Limits(120.0, 16 << 30)  # time for the plugin to load, also on a busy machine


class PjrtTopology:
    """The compiler of a topology, without its devices.

    Attributes:
        devices: the number of devices that it has.
        mesh_devices: None: no tensors are there, which could be sharded.

    Args:
        platform: JAX's name of the platform.
        topology: the plugin's name of the topology.
        environ: default environment variables for the plugin, which reads them when it loads.
        identity: returns everything about a topology that affects the compiled program: the same as `identity()` of a
            client of such a device.

    Raises:
        CompileError: there is no such topology.
    """

    mesh_devices = None

    def __init__(
        self,
        platform: str,
        topology: str,
        environ: Mapping[str, str],
        identity: Callable[[TopologyDescription], Mapping[str, str]],
        *,
        inject_faults: bool = False,
    ) -> None:
        self.platform = platform
        self._topology = topology
        self._environ = dict(environ)
        self.child = ChildProcess("dynaxla.runtime.topology_worker", inject_faults=inject_faults)
        described: TopologyDescription = self._ask(None, _START)
        self._identity = identity(described)
        self.devices = described.devices

    def identity(self) -> Mapping[str, str]:
        """The identity that a client of such a device returns, for cache keys."""
        return self._identity

    def prepare(self) -> None:
        """Does nothing: the child process is already running, as it described the topology."""

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> TopologyProgram:
        """Compiles with the target's own compiler.

        Args:
            partitions: the number of devices over which the module is partitioned.

        Raises:
            CompileError: the topology has fewer devices, or the compiler refused the program (for instance because it does
                not fit the device's memory), crashed, or took too much time or memory.
        """
        if partitions > self.devices:
            raise CompileError(
                explanation=f"the topology {self._topology!r} has {self.devices} devices, and the mesh {partitions}",
                hint="name a larger topology, or make a smaller mesh",
            )
        compiled: TopologyExecutable = self._ask(module, limits, partitions)
        return TopologyProgram(
            compiled,
            lambda: str(self._ask(module, limits, partitions, hlo=True)),
            lambda mesh, results: self._ask(module, limits, partitions, grid=(mesh.shape, mesh.axes, results)),
        )

    def _ask(
        self, module: bytes | None, limits: Limits, partitions: int = 1, *, hlo: bool = False, grid: Any = None
    ) -> Any:
        request = TopologyRequest(self._environ, self.platform, self._topology, module, hlo, partitions, grid)
        reply = request_compile(self.child, request, limits)
        if isinstance(reply, CompileRejected):
            what = f"the topology {self._topology!r}" if module is None else "the program"
            raise CompileError(
                explanation=f"the {self.platform} compiler refused {what}: {reply.message}",
                hint="see XLA's reason above",
            )
        return reply


OutputAxes = tuple[tuple[str, ...], ...] | None
"""Of each dim of a result the axes over which it is split; dims at the end may be left out; None: no axes say it."""


class TopologyProgram:
    """A program for an absent device: it can be stored and inspected, but not run."""

    def __init__(
        self,
        compiled: TopologyExecutable,
        hlo_text: Callable[[], str],
        read_axes: Callable[[Mesh, int], Sequence[OutputAxes]],
    ) -> None:
        self._compiled = compiled
        self.hlo_text = hlo_text
        self.read_axes = read_axes

    def serialize(self) -> bytes | None:
        """The executable in bytes that a client of such a device loads; None if the platform cannot serialize it."""
        serialized = self._compiled.serialized
        return None if serialized is None else compress_executable(serialized)

    def memory_use(self) -> MemoryUse:
        return self._compiled.memory

    def cost(self) -> dict[str, float]:
        return dict(self._compiled.cost)


def read_result_shardings(
    program: CompiledModule, results: Sequence[torch.Tensor], mesh: Mesh
) -> tuple[Sharding | None, ...]:
    """How the results of a program for a mesh are sharded; None for a result that no spec describes.

    Args:
        program: of a topology, or of a live client.
        results: tensors with the results' shapes.
    """
    if isinstance(program, TopologyProgram):
        found = program.read_axes(mesh, len(results))
    else:
        assert isinstance(program, PjrtExecutable)
        grid = make_grid(program.handle.local_devices(), mesh.shape, mesh.axes)
        found = xla.read_output_axes(program.handle, grid, len(results))
    ranked = zip(found, (tensor.dim() for tensor in results), strict=True)
    return tuple(None if axes is None else Sharding(mesh, axes + ((),) * (rank - len(axes))) for axes, rank in ranked)
