"""torch's profiler begins, ends and exports each cycle by functions that can be followed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dynaxla.profiling import follow_torch_profiles
from dynaxla.torch_api import profiler
from tests.torch_api.boundary import boundary


@boundary("profiler.record_devices", "profiler.find_recording")
def test_a_profile_records_the_devices(tmp_path: Path) -> None:
    follow_torch_profiles()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        assert profiler.find_recording(run) is None
        torch.ones(2) + 1
    assert profiler.find_recording(run).ops == []
    run.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event.get("pid") == "PJRT" for event in trace["traceEvents"])
    assert trace["baseTimeNanoseconds"] > 0
