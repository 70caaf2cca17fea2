"""The compiler for an absent device in a child process. `python -m dynaxla.runtime.topology_worker FD` is the child."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from dynaxla.isolation.children import serve
from dynaxla.runtime import xla
from dynaxla.runtime.executable_info import CompileRejected, MemoryUse, PjrtCompiled


class TopologyRequest(NamedTuple):
    """A request to the child.

    Attributes:
        environ: default environment variables for the platform's plugin, which reads them when it loads.
        platform: JAX's name of the platform.
        topology: the plugin's name of the topology.
        module: StableHLO bytecode; None requests the description of the topology only.
        hlo: requests the text of the optimized program instead of the program.
        partitions: the number of devices, the topology's first ones, over which the module is partitioned.
        grid: requests, in place of the program, the axes over which its results are split: of the mesh the devices along each
            axis, and their names, and the number of results.
    """

    environ: Mapping[str, str]
    platform: str
    topology: str
    module: bytes | None
    hlo: bool = False
    partitions: int = 1
    grid: tuple[tuple[int, ...], tuple[str, ...], int] | None = None


@dataclass(frozen=True, slots=True)
class TopologyDescription:
    """The description of a topology.

    Attributes:
        device_kind: the kind of its first device, for which programs are compiled.
        devices: the number of devices.
        version: the compiler's version.
    """

    device_kind: str
    devices: int
    version: str


@dataclass(frozen=True, slots=True)
class TopologyExecutable:
    """A program for an absent device.

    Attributes:
        serialized: the executable, for a client of such a device; None if the platform cannot serialize it.
        cost: XLA's cost analysis.
    """

    serialized: bytes | None
    memory: MemoryUse
    cost: Mapping[str, float]


@cache
def _topology(platform: str, topology: str) -> Any:
    return xla.topology(platform, topology)


@lru_cache(maxsize=1)
def _compile(platform: str, topology: str, module: bytes, partitions: int) -> Any:
    return xla.compile_ahead(_topology(platform, topology).devices[:partitions], module)


def answer_request(
    request: TopologyRequest,
) -> TopologyDescription | TopologyExecutable | str | list[Any] | CompileRejected:
    """Answers a request: the topology's description, the program, its text or its axes, or the compiler's refusal."""
    for name, value in request.environ.items():
        os.environ.setdefault(name, value)
    error = xla.load().Error
    try:
        if request.module is None:
            return _describe_topology(_topology(request.platform, request.topology))
        handle = _compile(request.platform, request.topology, request.module, request.partitions)
    except error as refusal:
        return CompileRejected(str(refusal))
    compiled = PjrtCompiled(handle)
    if request.hlo:
        return compiled.hlo_text()
    if request.grid is not None:
        shape, axes, results = request.grid
        devices = _topology(request.platform, request.topology).devices[: request.partitions]
        return xla.read_output_axes(handle, make_grid(devices, shape, axes), results)
    try:
        serialized = bytes(handle.serialize())
    except error:
        serialized = None
    return TopologyExecutable(serialized, compiled.memory_use(), compiled.cost())


def make_grid(devices: Sequence[Any], shape: Sequence[int], axes: Sequence[str]) -> Any:
    """JAX's mesh of devices, row-major."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(devices).reshape(tuple(shape)), tuple(axes))


def _describe_topology(topology: Any) -> TopologyDescription:
    device = topology.devices[0]
    return TopologyDescription(device.device_kind, len(topology.devices), device.client.platform_version)


if __name__ == "__main__":
    from dynaxla.runtime import topology_worker

    serve(sys.argv[1:], topology_worker.answer_request)
