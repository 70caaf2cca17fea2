"""`dynaxla.profile`: what the host and the devices did in a block, on one timeline, with the user's modules and lines.

torch's profiler sees the host, PJRT's the devices; both tell times by the same clock. Every `torch.profiler.profile` runs a
`DeviceSession` beside it (`torch_api/profiler.py`), so that the trace that it exports has both; a profile here is one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from dynaxla.profiling import follow_torch_profiles
from dynaxla.profiling.device_ops import DeviceOp
from dynaxla.profiling.device_time import write_device_time
from dynaxla.profiling.session import Recording, check_profilers
from dynaxla.torch_api.profiler import find_recording


@dataclass(frozen=True, slots=True)
class HostSpan:
    """A range of the host: an op, a span of this package's, or a `record_function` of the user's.

    Attributes:
        name: its name.
        start_ms, end_ms: by torch's profiler, from a common beginning.
        within: the names of the ranges around it, the innermost first.
    """

    name: str
    start_ms: float
    end_ms: float
    within: tuple[str, ...]


@dataclass
class Profile:
    """A profile; what it recorded is there once its block has ended.

    Attributes:
        spans: what the host did, in the order of their begins.
        recording: of the devices.
        seconds: how long the block took, by the clock.
        reading_s: seconds that it took to stop the profilers and to write what they recorded.
    """

    spans: list[HostSpan] = field(default_factory=list)
    recording: Recording = field(default_factory=lambda: Recording(b"", {}))
    seconds: float = 0.0
    reading_s: float = 0.0

    @property
    def ops(self) -> list[DeviceOp]:
        """The instructions that devices ran, with their sources in the user's program."""
        return self.recording.ops

    def __str__(self) -> str:
        """Tables of the devices' time by the user's modules, by lines, and by ops."""
        return write_device_time(self.ops, self.seconds, self.reading_s)


@contextmanager
def profile(folder: str | Path | None = None) -> Iterator[Profile]:
    """Profiles a block: `with dynaxla.profile("traces") as profile: step()`, then `print(profile)`.

    Args:
        folder: `plugins/profile/TIME/` in it gets HOST.xplane.pb, which `tensorboard --logdir` and xprof read, and
            HOST.trace.json.gz, which ui.perfetto.dev opens. None writes nothing.

    Raises:
        ProfileError: the profiler of a plugin that is loaded would end the process.
        OSError: the folder cannot be written.
    """
    check_profilers()
    follow_torch_profiles()
    made = Profile()
    with torch_profile(activities=[ProfilerActivity.CPU]) as of_torch:
        started = time.perf_counter()
        yield made
        made.seconds = time.perf_counter() - started
    made.recording, made.spans = find_recording(of_torch), _list_spans(of_torch)
    if folder is not None:
        _write(Path(folder), made.recording, of_torch)
    made.reading_s = time.perf_counter() - started - made.seconds


def _list_spans(of_torch: Any) -> list[HostSpan]:
    spans = [
        HostSpan(each.name, each.time_range.start / 1e3, each.time_range.end / 1e3, tuple(_list_parents(each)))
        for each in of_torch.events()
    ]
    return sorted(spans, key=lambda span: span.start_ms)


def _list_parents(event: Any) -> Iterator[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name


def _write(folder: Path, recording: Recording, of_torch: Any) -> None:
    run = folder / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S")
    run.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    (run / f"{host}.xplane.pb").write_bytes(recording.space)
    of_torch.export_chrome_trace(str(run / f"{host}.trace.json.gz"))
