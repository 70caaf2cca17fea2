"""dynaxla: `torch.compile(model, backend="dynaxla")` runs PyTorch on XLA.

Importing this package imports neither torch nor jax: the lowering worker, a process of its own, imports it too. Where torch
is there already, executables become a part of torch's cache artifacts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dynaxla.policy.sizes import *  # noqa: F403
from dynaxla.policy.sizes import __all__ as _policies

if TYPE_CHECKING:
    from dynaxla.ahead.aot import compile_for_target
    from dynaxla.ahead.reports import ProgramReport
    from dynaxla.ahead.warming import freeze, warmup
    from dynaxla.backend import dynaxla
    from dynaxla.bucketing.planning import Histogram, Plan, plan_buckets
    from dynaxla.device.loading import DeviceLoader
    from dynaxla.device.using import device_mode, use
    from dynaxla.kernels.registering import register_lowering
    from dynaxla.observe.recorder import Metrics
    from dynaxla.process import mark_bucketed, read_metrics, recorder, report

__version__ = "0.1.0"

__all__ = [
    "DeviceLoader",
    "Histogram",
    "Metrics",
    "Plan",
    "ProgramReport",
    "__version__",
    "compile_for_target",
    "device_mode",
    "dynaxla",
    "freeze",
    "mark_bucketed",
    "plan_buckets",
    "read_metrics",
    "recorder",
    "register_lowering",
    "report",
    "use",
    "warmup",
    *_policies,
]

_HOMES = {
    **dict.fromkeys(("mark_bucketed", "read_metrics", "recorder", "report"), "dynaxla.process"),
    **dict.fromkeys(("Histogram", "Plan", "plan_buckets"), "dynaxla.bucketing.planning"),
    **dict.fromkeys(("freeze", "warmup"), "dynaxla.ahead.warming"),
    "dynaxla": "dynaxla.backend",
    "ProgramReport": "dynaxla.ahead.reports",
    "compile_for_target": "dynaxla.ahead.aot",
    "Metrics": "dynaxla.observe.recorder",
    "register_lowering": "dynaxla.kernels.registering",
    "DeviceLoader": "dynaxla.device.loading",
    **dict.fromkeys(("device_mode", "use"), "dynaxla.device.using"),
}


if "torch" in sys.modules:
    # torch loads no artifacts at all where there is one whose type nobody registered.
    from dynaxla.runtime.kept import carry_executables

    carry_executables()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dynaxla' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
