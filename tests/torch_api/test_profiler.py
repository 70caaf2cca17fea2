"""torch's profiler begins, ends and exports each cycle by functions that can be followed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.torch_api.boundary import boundary

PROFILED = """
import json, sys, torch
from torch.profiler import ProfilerActivity, profile
from dynaxla.profiling import follow_torch_profiles
from dynaxla.torch_api import profiler

follow_torch_profiles()
with profile(activities=[ProfilerActivity.CPU]) as run:
    assert profiler.find_recording(run) is None
    torch.ones(2) + 1
assert profiler.find_recording(run).ops == []
run.export_chrome_trace(sys.argv[1])
with open(sys.argv[1]) as file:
    trace = json.load(file)
assert any(event.get("pid") == "PJRT" for event in trace["traceEvents"])
assert trace["baseTimeNanoseconds"] > 0
"""


@boundary("profiler.record_devices", "profiler.find_recording")
def test_a_profile_records_the_devices(tmp_path: Path) -> None:
    """In a process of its own: where JAX has loaded libtpu and no TPU is, devices are not recorded."""
    command = [sys.executable, "-c", PROFILED, str(tmp_path / "trace.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
