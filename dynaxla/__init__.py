"""dynaxla: `torch.compile(model, backend="dynaxla")` runs PyTorch on XLA.

Importing this package imports neither torch nor jax: the lowering worker, a process of its own, imports it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxla.aot import ProgramReport, compile_for_target
    from dynaxla.backend import dynaxla, read_metrics, recorder
    from dynaxla.metrics.recorder import Metrics

__version__ = "0.1.0"

__all__ = ["Metrics", "ProgramReport", "__version__", "compile_for_target", "dynaxla", "read_metrics", "recorder"]

_HOMES = {
    "Metrics": "dynaxla.metrics.recorder",
    "ProgramReport": "dynaxla.aot",
    "compile_for_target": "dynaxla.aot",
    "dynaxla": "dynaxla.backend",
    "read_metrics": "dynaxla.backend",
    "recorder": "dynaxla.backend",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dynaxla' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
