"""torch's profiler, beside which the devices' profilers run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.profiler import profiler

_SESSION = "_dynaxla_session"
_RECORDING = "_dynaxla_recording"


def record_devices(begin: Callable[[], Any]) -> None:
    """Has every `torch.profiler.profile` record what PJRT's devices do, too, and write it into the trace that it exports. Once.

    Relies on `_KinetoProfile.start_trace`, `stop_trace` and `export_chrome_trace(path, ...)`, which `profile` inherits and
    calls for each cycle of its schedule.

    Args:
        begin: begins a session, whose `stop()` gives a recording with `merge_into(path)`; or gives None.
    """
    owner: Any = profiler._KinetoProfile
    if hasattr(owner.start_trace, "__wrapped__"):
        return
    start, stop, export = owner.start_trace, owner.stop_trace, owner.export_chrome_trace

    @functools.wraps(start)
    def start_trace(self: Any) -> None:
        setattr(self, _SESSION, begin())  # first: what it imports is no part of the profile
        start(self)

    @functools.wraps(stop)
    def stop_trace(self: Any) -> None:
        session = self.__dict__.pop(_SESSION, None)
        if session is not None:
            setattr(self, _RECORDING, session.stop())
        stop(self)

    @functools.wraps(export)
    def export_chrome_trace(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        export(self, path, *args, **kwargs)
        recording = find_recording(self)
        if recording is not None:
            recording.merge_into(path)

    owner.start_trace, owner.stop_trace, owner.export_chrome_trace = start_trace, stop_trace, export_chrome_trace


def find_recording(profile: Any) -> Any:
    """What the devices' profilers recorded beside a profile of torch's; None before it ends."""
    return getattr(profile, _RECORDING, None)
