"""What runs beside a profile of torch's: PJRT's profilers, and spans around this package's work on the host.

The spans are put around functions for the time of a profile, so that they cost nothing at other times.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from torch.profiler import record_function

from dynaxla.errors import ProfileError
from dynaxla.isolation.forking import list_followed
from dynaxla.profiling.device_ops import DeviceOp, list_programs, read_device_ops
from dynaxla.profiling.device_time import add_device_ops
from dynaxla.runtime import xla
from dynaxla.runtime.loaded_executables import PjrtExecutable

logger = logging.getLogger("dynaxla")

PREFIX = "dynaxla: "

SPANS = {
    "dispatch.CompiledPart.__call__": "call",
    "dispatch.MissHandler.serve": "miss",
    "programs.staged_arguments.StagedArguments.fill": "copy and pad",
    "programs.argument_binder.HostBinder.bind_padded": "pad",
    "device.compiled_graphs.DeviceBinder.bind_padded": "pad",
    "runtime.loaded_executables.PjrtExecutable.run": "execute",
    "bucketing.cropping.Cropping.crop": "crop",
    "pipeline.Pipeline.compile_calls": "compile",
    "lowering.graph_lowering.GraphLowering.functions": "lower",
    "runtime.pjrt_clients.PjrtClient.compile": "XLA",
    "runtime.pjrt_clients.CpuClient.compile": "XLA in a child process",
    "device.cpu_fallback.CpuFallbackRunner.run": "host fallback",
}
"""The functions that profiles show, where their modules are loaded, and how they call them."""


@dataclass(frozen=True)
class Recording:
    """What PJRT's profilers recorded.

    Attributes:
        space: an XSpace, which TensorBoard's profile plugin and xprof read.
        programs: the optimized HLO of the programs that ran, by the names of their modules.
    """

    space: bytes
    programs: dict[str, str]

    @cached_property
    def ops(self) -> list[DeviceOp]:
        """The instructions that devices ran."""
        return read_device_ops(self.space, self.programs)

    def merge_into(self, trace: str) -> None:
        """Adds the instructions to a trace that torch wrote."""
        add_device_ops(Path(trace), self.ops)


class DeviceSession:
    """PJRT's profilers and the spans of the host, from its making to `stop`."""

    def __init__(self) -> None:
        profiler = xla.load().profiler
        options = profiler.ProfileOptions()
        options.python_tracer_level = 0
        self._spans = ExitStack()
        self._session = profiler.ProfilerSession(options)
        self._spans.enter_context(_show_spans())

    def stop(self) -> Recording:
        self._spans.close()
        space = bytes(self._session.stop())
        ran = list_programs(space)
        held = ((name, each) for each in list_followed(PjrtExecutable) for name in each.module_names())
        return Recording(space, {name: each.hlo_text() for name, each in held if name in ran})


def check_profilers() -> None:
    """Raises:
    ProfileError: the profiler of a plugin that is loaded would end the process.
    """
    if xla.has_libtpu_without_chip():
        raise ProfileError(
            "libtpu is loaded in this process, which has no TPU, and its profiler would end the process",
            "set JAX_PLATFORMS=cpu before JAX is used, or compile for a TPU in another process",
        )


def begin_beside_torch() -> DeviceSession | None:
    """A session beside a profile of torch's; None, with a warning, where the devices cannot be profiled."""
    try:
        check_profilers()
    except ProfileError as error:
        logger.warning("the profile shows the host alone: %s", error)
        return None
    return DeviceSession()


@contextmanager
def _show_spans() -> Iterator[None]:
    with ExitStack() as stack:
        for path, label in SPANS.items():
            module, owner, name = path.rsplit(".", 2)
            if (loaded := sys.modules.get(f"dynaxla.{module}")) is not None:
                kind = getattr(loaded, owner)
                stack.enter_context(mock.patch.object(kind, name, _in_span(getattr(kind, name), label)))
        yield


def _in_span(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"{PREFIX}{label}"):
            return function(*args, **kwargs)

    return run
