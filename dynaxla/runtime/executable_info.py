"""Text, memory use and cost of a PJRT executable. Imports no torch, as the compiling child processes use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that an executable needs on the device, in bytes.

    Attributes:
        aliased_bytes: bytes of outputs that reuse the memory of donated arguments.
    """

    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    code_bytes: int
    aliased_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.arguments_bytes + self.outputs_bytes - self.aliased_bytes + self.temporaries_bytes + self.code_bytes


class PjrtCompiled:
    """A PJRT executable, loaded or not: its text, memory use and cost."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def handle(self) -> Any:
        """PJRT's executable."""
        return self._handle

    def hlo_text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._handle.hlo_modules())

    def memory_use(self) -> MemoryUse:
        stats = self._handle.get_compiled_memory_stats()
        return MemoryUse(
            arguments_bytes=stats.argument_size_in_bytes,
            outputs_bytes=stats.output_size_in_bytes,
            temporaries_bytes=stats.temp_size_in_bytes,
            code_bytes=stats.generated_code_size_in_bytes,
            aliased_bytes=stats.alias_size_in_bytes,
        )

    def cost(self) -> dict[str, float]:
        """XLA's cost analysis: "flops", "bytes accessed" and more. Empty if the platform has none."""
        found = self._handle.cost_analysis()
        return dict(found[0] if isinstance(found, list) else found) if found else {}
