"""Published figures of chips, for a program's least run time and whether it fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TERA, _GIGA, _GIB = 1e12, 1e9, 1 << 30


@dataclass(frozen=True, slots=True)
class Chip:
    """The figures of one chip.

    Attributes:
        name: the chip's generation.
        flops_per_s: peak bfloat16 operations per second; a multiply-add counts as two.
        hbm_bytes: the size of its memory.
        hbm_bytes_per_s: peak memory bandwidth.
        source: the address of the published figures.
        links_bytes_per_s: what it sends to other chips of a slice, over all its links: half of the published bandwidth of both
            directions together; None: not published there.
    """

    name: str
    flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    source: str
    links_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least run time of a program on a chip.

    Attributes:
        compute_s: time of its operations at the published peak.
        memory_s: time of its memory traffic at the published bandwidth.
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
        """The bottleneck: "compute" or "memory"."""
        return "compute" if self.compute_s > self.memory_s else "memory"


# Google publishes no float32 peak of these chips. Capacities are published in "GB" and are powers of two, as device memory is.
TPU_CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            # 275 TFLOPS (bf16), 32 GiB, 1,200 GBps
            Chip("v4", 275 * _TERA, 32 * _GIB, 1200 * _GIGA, "https://cloud.google.com/tpu/docs/v4"),
            # 197 TFLOPs (bf16), 16 GB, 819 GBps, bidirectional inter-chip interconnect 400 GBps per chip
            Chip("v5e", 197 * _TERA, 16 * _GIB, 819 * _GIGA, "https://cloud.google.com/tpu/docs/v5e", 200 * _GIGA),
            # 459 TFLOPs (bf16), 95 GB, 2765 GBps, bidirectional inter-chip interconnect 1200 GBps per chip
            Chip("v5p", 459 * _TERA, 95 * _GIB, 2765 * _GIGA, "https://cloud.google.com/tpu/docs/v5p", 600 * _GIGA),
            # 918 TFLOPs (bf16), 32 GB, 1638 GBps, bidirectional inter-chip interconnect 800 GBps per chip
            Chip("v6e", 918 * _TERA, 32 * _GIB, 1638 * _GIGA, "https://cloud.google.com/tpu/docs/v6e", 400 * _GIGA),
        )
    }
)
