"""The compiler of a device that is not here, in a process of its own. `python -m dynaxla.runtime.topology_worker FD`
is that process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from dynaxla.isolation.children import serve
from dynaxla.runtime import xla
from dynaxla.runtime.executable_info import MemoryUse, PjrtCompiled
from dynaxla.runtime.xla import Rejected


class Request(NamedTuple):
    """Attributes:
    environ: variables that the platform's plugin reads when it loads, where nobody has set them.
    platform, topology: JAX's name of the platform, the plugin's of the topology.
    module: StableHLO bytecode; None only asks for the topology.
    hlo: asks for the text of the optimized program, not for the program.
    """

    environ: Mapping[str, str]
    platform: str
    topology: str
    module: bytes | None
    hlo: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """A topology.

    Attributes:
        device_kind: of its first device, for which programs are compiled.
        devices: how many it has.
        version: the compiler's.
    """

    device_kind: str
    devices: int
    version: str


@dataclass(frozen=True, slots=True)
class CompiledAhead:
    """A program for a device that is not here.

    Attributes:
        serialized: the executable, for a client of such a device; None where the platform cannot serialize it.
        cost: XLA's cost analysis.
    """

    serialized: bytes | None
    memory: MemoryUse
    cost: Mapping[str, float]


@cache
def _topology(platform: str, topology: str) -> Any:
    return xla.topology(platform, topology)


@lru_cache(maxsize=1)
def _compiled(platform: str, topology: str, module: bytes) -> Any:
    return xla.compile_ahead(_topology(platform, topology).devices[0], module)


def answer(request: Request) -> Described | CompiledAhead | str | Rejected:
    """What is asked for; or what was said against it."""
    for name, value in request.environ.items():
        os.environ.setdefault(name, value)
    error = xla.load().Error
    try:
        if request.module is None:
            return _described(_topology(request.platform, request.topology))
        handle = _compiled(request.platform, request.topology, request.module)
    except error as refusal:
        return Rejected(str(refusal))
    compiled = PjrtCompiled(handle)
    if request.hlo:
        return compiled.hlo_text()
    try:
        serialized = bytes(handle.serialize())
    except error:
        serialized = None
    return CompiledAhead(serialized, compiled.memory_use(), compiled.cost())


def _described(topology: Any) -> Described:
    device = topology.devices[0]
    return Described(device.device_kind, len(topology.devices), device.client.platform_version)


if __name__ == "__main__":
    from dynaxla.runtime import topology_worker

    serve(sys.argv[1:], topology_worker.answer)
