"""PJRT topologies: compilers for devices that are not here."""

from __future__ import annotations

from typing import Any

from dynaxla.errors import CompileError
from dynaxla.runtime import xla
from dynaxla.runtime.executables import PjrtCompiled


class PjrtTopology:
    """The compiler of a topology, without its devices.

    Args:
        platform: JAX's name of it.
        topology: jaxlib's.
    """

    def __init__(self, platform: str, topology: Any) -> None:
        self.platform = platform
        self._device = topology.devices[0]

    def compile_only(self, module: bytes) -> PjrtCompiled:
        """Compiles with the target's own compiler.

        Raises:
            CompileError: the compiler refused the program, for instance because it does not fit the memory.
        """
        try:
            handle = xla.compile_ahead(self._device, module)
        except xla.load().Error as error:
            raise CompileError(
                explanation=f"the {self.platform} compiler refused the program: {error}",
                hint="read the reason in XLA's words above",
            ) from error
        return PjrtCompiled(handle)
