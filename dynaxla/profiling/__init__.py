"""Profiles of the host and the devices. What they need is imported when one begins."""

from __future__ import annotations

from dynaxla.torch_api.profiler import record_devices


def follow_torch_profiles() -> None:
    """Has every profile of torch's record the devices, too, from now on."""
    record_devices(_begin)


def _begin() -> object:
    from dynaxla.profiling.session import begin_beside_torch

    return begin_beside_torch()
