"""dynaxla: `torch.compile(model, backend="dynaxla")` runs PyTorch on XLA.

Importing this package imports neither torch nor jax: the lowering worker, a process of its own, imports it too. Where torch
is there already, executables become a part of torch's cache artifacts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dynaxla.bucket_policy.sizes import *  # noqa: F403
from dynaxla.bucket_policy.sizes import __all__ as _policies

if TYPE_CHECKING:
    from dynaxla import distributed as distributed
    from dynaxla.backend import dynaxla
    from dynaxla.bucketing.bucket_planner import Histogram, Plan, plan_buckets
    from dynaxla.custom_kernels.register import register_lowering
    from dynaxla.custom_ops.constrain import constrain
    from dynaxla.device.device_loader import DeviceLoader
    from dynaxla.device.launch import launch
    from dynaxla.device.registration import device_mode, use
    from dynaxla.device.sharding import fully_shard, make_mesh, shard, sharding
    from dynaxla.explaining.account import report
    from dynaxla.explaining.explanation import Explanation, explain
    from dynaxla.mesh import Mesh, Sharding
    from dynaxla.observe.recorder import Metrics
    from dynaxla.precompile.compile_for_target import compile_for_target
    from dynaxla.precompile.program_report import ProgramReport
    from dynaxla.precompile.warmup import freeze, warmup
    from dynaxla.profiling.profile import Profile, profile
    from dynaxla.runtime_state import mark_bucketed, prometheus_text, read_metrics, recorder
    from dynaxla.verify.compare_functions import Comparison, compare

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "DeviceLoader",
    "Explanation",
    "Histogram",
    "Mesh",
    "Metrics",
    "Plan",
    "Profile",
    "ProgramReport",
    "Sharding",
    "__version__",
    "compare",
    "compile_for_target",
    "constrain",
    "device_mode",
    "dynaxla",
    "explain",
    "freeze",
    "fully_shard",
    "launch",
    "make_mesh",
    "mark_bucketed",
    "plan_buckets",
    "profile",
    "prometheus_text",
    "read_metrics",
    "recorder",
    "register_lowering",
    "report",
    "shard",
    "sharding",
    "use",
    "warmup",
    *_policies,
]

_HOMES = {
    **dict.fromkeys(("mark_bucketed", "prometheus_text", "read_metrics", "recorder"), "dynaxla.runtime_state"),
    "report": "dynaxla.explaining.account",
    **dict.fromkeys(("Histogram", "Plan", "plan_buckets"), "dynaxla.bucketing.bucket_planner"),
    **dict.fromkeys(("freeze", "warmup"), "dynaxla.precompile.warmup"),
    "dynaxla": "dynaxla.backend",
    "ProgramReport": "dynaxla.precompile.program_report",
    "compile_for_target": "dynaxla.precompile.compile_for_target",
    **dict.fromkeys(("Explanation", "explain"), "dynaxla.explaining.explanation"),
    **dict.fromkeys(("Profile", "profile"), "dynaxla.profiling.profile"),
    "Metrics": "dynaxla.observe.recorder",
    "register_lowering": "dynaxla.custom_kernels.register",
    "DeviceLoader": "dynaxla.device.device_loader",
    "constrain": "dynaxla.custom_ops.constrain",
    **dict.fromkeys(("fully_shard", "make_mesh", "shard", "sharding"), "dynaxla.device.sharding"),
    **dict.fromkeys(("Mesh", "Sharding"), "dynaxla.mesh"),
    **dict.fromkeys(("device_mode", "use"), "dynaxla.device.registration"),
    "launch": "dynaxla.device.launch",
    **dict.fromkeys(("Comparison", "compare"), "dynaxla.verify.compare_functions"),
}


if "torch" in sys.modules:
    # torch loads no artifacts at all where there is one whose type nobody registered.
    from dynaxla.runtime.executable_cache import carry_executables

    carry_executables()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in (*_HOMES, "distributed"):
        raise AttributeError(f"module 'dynaxla' has no attribute {name!r}")
    from importlib import import_module

    from dynaxla.isolation.interrupts import defer_interrupts

    with defer_interrupts():  # of JAX, half imported, nothing could be imported later
        if name == "distributed":
            return import_module("dynaxla.distributed")
        return getattr(import_module(_HOMES[name]), name)
