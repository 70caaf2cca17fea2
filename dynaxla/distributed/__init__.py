"""Several processes: how they meet, and torch.distributed's process groups of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxla.distributed.job import initialize, process_count, process_index, save

__all__ = ["initialize", "process_count", "process_index", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dynaxla.distributed' has no attribute {name!r}")
    from dynaxla.distributed import job

    return getattr(job, name)
