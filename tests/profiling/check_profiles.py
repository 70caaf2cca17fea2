"""A profile has the host and the devices on one timeline, with the user's modules and lines. `test_profiles.py` runs these."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

import dynaxla
from dynaxla.dispatch import CompiledPart
from dynaxla.profiling.device_ops import DeviceOp, subtract_waits
from dynaxla.profiling.device_time import group_time, module_of
from dynaxla.profiling.session import PREFIX
from tests.lowering.user_program import load


def compile_model(folder: Path) -> tuple[nn.Module, Any, int]:
    module, line = load(folder, "profiled", 0)
    torch.compiler.reset()
    model = module.Model()
    return model, torch.compile(model, backend="dynaxla"), line


def known_share(ops: list[DeviceOp]) -> float:
    return sum(op.self_ns for op in ops if op.source is not None) / sum(op.self_ns for op in ops)


def read_trace(folder: Path) -> list[dict[str, Any]]:
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def test_training_step_by_module_and_line(tmp_path: Path) -> None:
    _, compiled, line = compile_model(tmp_path)
    x = torch.randn(4, 8)
    compiled(x).sum().backward()
    with dynaxla.profile(tmp_path) as profile, record_function("my step"):
        compiled(x).sum().backward()
    assert known_share(profile.ops) >= 0.95
    modules = set(group_time(profile.ops, module_of))
    assert {"blocks.0.inner", "blocks.0", "blocks.1.inner/backward", "blocks.1/backward"} <= modules
    softmax = [op.source for op in profile.ops if op.source is not None and op.source.op == "_softmax"]
    assert {source.place for source in softmax} == {f"{tmp_path / 'profiled.py'}:{line}"}
    assert "device time by module" in str(profile)

    events = read_trace(tmp_path)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    runs = [event for event in events if event.get("name") == f"{PREFIX}execute"]
    assert len(kernels) == len(profile.ops)
    assert len(runs) == 2
    assert any(event.get("name") == "my step" for event in events)
    for event in kernels:  # the two clocks are one
        assert any(run["ts"] - 50 <= event["ts"] and event["ts"] <= run["ts"] + run["dur"] + 50 for run in runs)


@torch.no_grad()
def test_a_loop_by_modules_and_lines_of_its_body(tmp_path: Path) -> None:
    module, line = load(tmp_path, "looping", 0)
    torch.compiler.reset()
    compiled, x = torch.compile(module.Looped(), backend="dynaxla"), torch.randn(4, 8)
    compiled(x)
    with dynaxla.profile(tmp_path) as profile:
        compiled(x)
    inner = [op.source for op in profile.ops if op.source is not None and op.source.outer is not None]
    assert {"first", "first.inner", "second"} <= {source.module for source in inner}
    assert {source.place for source in inner if source.op == "_softmax"} == {f"{tmp_path / 'looping.py'}:{line}"}
    loops = {source.outer.place for source in inner if source.outer is not None and source.outer.op == "while_loop"}
    (loop,) = loops
    assert (tmp_path / "looping.py").read_text().splitlines()[int(loop.rpartition(":")[2]) - 1].count("while_loop") == 1
    within = {event["args"].get("within") for event in read_trace(tmp_path) if event.get("cat") == "kernel"}
    assert f"while_loop {loop}" in within


def make_op(name: str, start_ns: float, duration_ns: float, lane: str = "a") -> DeviceOp:
    return DeviceOp(name, "program", None, lane, start_ns, duration_ns, duration_ns)


def test_a_loop_waits_for_other_threads() -> None:
    ops = [
        make_op("while", 100, 1000),
        make_op("call", 100, 300),
        make_op("add", 110, 200),
        make_op("mul", 300, 200, "b"),
        make_op("exp", 450, 250, "c"),
        make_op("tanh", 1050, 100, "b"),
        make_op("add", 2000, 50),
    ]
    own = [op.self_ns for op in subtract_waits(ops, {("program", "while"), ("program", "call")})]
    assert own == [350, 10, 200, 200, 250, 100, 50]


def test_torchs_profiler_shows_the_device(tmp_path: Path) -> None:
    _, compiled, _ = compile_model(tmp_path)
    x = torch.randn(4, 8)
    with torch.no_grad():
        compiled(x)
        with torch_profile(activities=[ProfilerActivity.CPU]) as profile:
            compiled(x)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"].get("module") for event in events if event.get("cat") == "kernel"} >= {"blocks.0", "blocks.1"}
    assert any("Lookup" in event.get("name", "") for event in events)  # Dynamo's guards
    assert any(row.key == f"{PREFIX}execute" for row in profile.key_averages())


def test_a_schedule_has_the_device_in_each_cycle(tmp_path: Path) -> None:
    _, compiled, _ = compile_model(tmp_path)
    x, traces = torch.randn(4, 8), []

    def ready(profile: Any) -> None:
        traces.append(tmp_path / f"{len(traces)}.json")
        profile.export_chrome_trace(str(traces[-1]))

    plan = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    with torch.no_grad(), torch_profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready) as run:
        for _ in range(6):
            compiled(x)
            run.step()
    assert len(traces) == 2
    counts = [json.loads(trace.read_text())["traceEvents"] for trace in traces]
    kernels = [sum(event.get("cat") == "kernel" for event in events) for events in counts]
    assert kernels[0] == kernels[1] > 0


@pytest.mark.parametrize(("width", "pad"), [(9, "copy and pad"), (1 << 14, "pad")])
def test_padding_and_cropping_are_shown_in_a_bucket(width: int, pad: str, tmp_path: Path) -> None:
    """Small arguments are padded where they are copied to."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.softmax(-1) * 2, backend="dynaxla", dynamic=True)
    compiled(torch.randn(5, width))
    with dynaxla.profile(tmp_path):
        compiled(torch.randn(6, width))
    names = {event.get("name") for event in read_trace(tmp_path)}
    assert {f"{PREFIX}{stage}" for stage in ("call", pad, "execute", "crop")} <= names


def test_nothing_stays_behind() -> None:
    before = CompiledPart.__call__
    with dynaxla.profile():
        assert CompiledPart.__call__ is not before
    assert CompiledPart.__call__ is before


def test_xprof_reads_the_profile(tmp_path: Path) -> None:
    converter = pytest.importorskip("xprof.convert._pywrap_profiler_plugin")
    _, compiled, _ = compile_model(tmp_path)
    with torch.no_grad():
        compiled(torch.randn(4, 8))
        with dynaxla.profile(tmp_path) as profile:
            compiled(torch.randn(4, 8))
    (space,) = map(str, tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    content, is_read = converter.xspace_to_tools_data([space], "trace_viewer", {})
    assert is_read
    assert profile.ops
    assert all(op.name.encode() in content for op in profile.ops)


@pytest.mark.long
def test_bert_training_step_is_attributed() -> None:
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    model = transformers.BertForSequenceClassification(config)
    compiled = torch.compile(model, backend="dynaxla")
    ids, labels = torch.randint(0, 1000, (2, 32)), torch.tensor([0, 1])
    compiled(ids, labels=labels).loss.backward()
    with dynaxla.profile() as profile:
        compiled(ids, labels=labels).loss.backward()
    assert known_share(profile.ops) >= 0.95
    lined = sum(op.self_ns for op in profile.ops if op.source is not None and op.source.place)
    assert lined / sum(op.self_ns for op in profile.ops) >= 0.95
    modules = set(group_time(profile.ops, module_of))
    assert "bert.encoder.layer.0.intermediate.dense" in modules
    assert "bert.encoder.layer.1.output.dense/backward" in modules
