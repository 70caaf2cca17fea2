"""Published figures of chips: what a program can take at least, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TERA, _GIGA, _GIB = 1e12, 1e9, 1 << 30


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip.

    Attributes:
        name: its generation.
        flops_per_s: most operations per second, bfloat16 products counted as two each.
        hbm_bytes: its memory.
        hbm_bytes_per_s: most bytes per second between the memory and the chip.
        source: where the figures are published.
    """

    name: str
    flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time that a program can take on a chip.

    Attributes:
        compute_s: of its operations, at the published peak.
        memory_s: of its bytes, at the published bandwidth.
    """

    compute_s: float
    memory_s: float

    @classmethod
    def of(cls, chip: Chip, flops: float, accessed_bytes: float) -> Roofline:
        return cls(flops / chip.flops_per_s, accessed_bytes / chip.hbm_bytes_per_s)

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        """What takes the time: "compute" or "memory"."""
        return "compute" if self.compute_s > self.memory_s else "memory"


# Google publishes no float32 peak of any of them. Capacities are published in "GB" and are powers of two, as device memory is.
TPU_CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            # 275 TFLOPS (bf16), 32 GiB, 1,200 GBps
            Chip("v4", 275 * _TERA, 32 * _GIB, 1200 * _GIGA, "https://cloud.google.com/tpu/docs/v4"),
            # 197 TFLOPs (bf16), 16 GB, 819 GBps
            Chip("v5e", 197 * _TERA, 16 * _GIB, 819 * _GIGA, "https://cloud.google.com/tpu/docs/v5e"),
            # 459 TFLOPs (bf16), 95 GB, 2765 GBps
            Chip("v5p", 459 * _TERA, 95 * _GIB, 2765 * _GIGA, "https://cloud.google.com/tpu/docs/v5p"),
            # 918 TFLOPs (bf16), 32 GB, 1638 GBps
            Chip("v6e", 918 * _TERA, 32 * _GIB, 1638 * _GIGA, "https://cloud.google.com/tpu/docs/v6e"),
        )
    }
)
