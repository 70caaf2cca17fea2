"""The project's own benchmarks run on the harness."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import (
    attention_speed,
    cache_writes,
    convolution_speed,
    op_speed,
    product_speed,
    random_draws,
    value_check_cost,
    whole_step,
)
from benchmarks.stream import MODELS, VARY, make_case
from dynaxla.bench.measure import TimingSettings, measure_case

ROOT = Path(__file__).parents[2]
ONCE = TimingSettings(seconds=0.0, rounds=1, warm=1, repeats=1)


def commands() -> list[str]:
    """The benchmarks that docs/performance.md names."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"python -m (benchmarks\.\w+)", page)))


@pytest.mark.parametrize("module", commands())
def test_every_command_writes_a_record(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--json FILE" in printed
    assert "--html FILE" in printed


@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_cases_are_right() -> None:
    cases = [
        *whole_step.make_cases(argparse.Namespace(nets=["mlp-32"])),
        *(case for case in random_draws.make_cases(argparse.Namespace(elements=1024)) if case.name == "dropout"),
        next(attention_speed.make_cases(argparse.Namespace(calls=["2,8,4"]))),
        *op_speed.make_cases(argparse.Namespace(ops=["sort", "sin", "pow"], sizes=["8,64"], dtypes=["float32"])),
        *product_speed.make_cases(argparse.Namespace(sizes=["256,512"], rows=[1, 8], dtypes=["float32", "bfloat16"])),
        *convolution_speed.make_cases(argparse.Namespace(sizes=["1,8,6,2"], window=3, patches=["1,3,4,8,2"])),
        *value_check_cost.make_cases(argparse.Namespace(calls=["index_select", "//"])),
        next(cache_writes.make_cases(argparse.Namespace(lengths=[16], layers=1))),
    ]
    for case in cases:
        statuses = {result.name: result.check.status for result in measure_case(case, ONCE).results}
        expected = "unchecked" if case.check == "never" else "same"
        assert {name: status for name, status in statuses.items() if name != case.baseline} == dict.fromkeys(
            [name for name in case.ways if name != case.baseline], expected
        )


def test_a_stream_counts_programs_and_padding() -> None:
    given = argparse.Namespace(requests=5, ways=["default", "planned"], inductor=False, size_oblivious=False)
    found = measure_case(make_case("images", given), ONCE)
    assert MODELS.keys() == VARY.keys()
    for way in given.ways:
        result = found.of(way)
        assert result is not None
        assert result.check.status == "same"
        assert len(result.programs) == len(result.samples_s) == 5
        assert sum(result.programs) >= 1
        assert sum(padded for _, padded in result.elements) >= sum(true for true, _ in result.elements) > 0
