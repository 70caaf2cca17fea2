"""Counters by stage, tier, part and bucket, and their text for Prometheus."""

from __future__ import annotations

import builtins
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.errors import VersionError
from dynaxla.observe.recorder import Metrics, Recorder
from dynaxla.observe.usage import CALL_SECONDS, OTHER_BUCKETS, BucketCalls, CacheUse, CrossedBytes, PartCalls

DOCS = Path(__file__).parents[2] / "docs"


def compile_counted(function: Callable[..., Any], **settings: Any) -> Any:
    return torch.compile(function, backend="dynaxla", options={"call_metrics": True}, **settings)


@torch.no_grad()
def test_calls_are_counted_by_bucket(recorder: Recorder) -> None:
    compiled = compile_counted(lambda x: x.sin().cumsum(0), dynamic=True)
    before = len(recorder.snapshot().parts)
    with recorder.expect(compiles=2):
        for rows in (100, 120, 140, 128, 100):
            compiled(torch.randn(rows, 3))
    (part,) = recorder.snapshot().parts[before:]
    assert part.part == before
    assert "lambda" in part.function
    rows = 100 + 120 + 128 + 100
    assert {b.bucket: b for b in part.buckets} == {
        "3x128": BucketCalls("3x128", 4, 1, 3 * rows, 4 * 3 * 128),
        "3x192": BucketCalls("3x192", 1, 1, 3 * 140, 3 * 192),
    }
    assert (sum(part.counts), part.hits, len(part.counts)) == (5, 3, len(CALL_SECONDS) + 1)
    assert part.seconds > 0
    assert "3x128: 4 x 1.14" in dynaxla.report()


@torch.no_grad()
def test_fixed_and_exact_sizes_have_buckets_too(recorder: Recorder) -> None:
    before = len(recorder.snapshot().parts)
    compile_counted(lambda x: x.sin() + 1)(torch.randn(3))
    exact = torch.compile(
        lambda x: x.cos() + 1, backend="dynaxla", dynamic=True, options={"call_metrics": True, "bucketing": "off"}
    )
    exact(torch.randn(5))
    exact(torch.randn(6))
    found = [[b.bucket for b in part.buckets] for part in recorder.snapshot().parts[before:]]
    assert found == [["fixed"], ["exact 5", "exact 6"]]


def test_buckets_beyond_the_most_are_together() -> None:
    counter = Recorder().count_calls("f", 2, str)
    for key in (1, 2, 3, 4, 1):
        counter.count_call(key, seconds=2e-5, is_hit=True, true=10, padded=16)
    counter.count_program(4)
    counter.count_call(1, seconds=99.0, is_hit=False, true=10, padded=16)
    part = counter.snapshot()
    assert part.buckets == (
        BucketCalls("1", 3, 0, 30, 48),
        BucketCalls("2", 1, 0, 10, 16),
        BucketCalls(OTHER_BUCKETS, 2, 1, 20, 32),
    )
    assert (part.counts[1], part.counts[-1], part.hits) == (5, 1, 5)


@torch.no_grad()
def test_nothing_is_counted_unasked(recorder: Recorder) -> None:
    before = len(recorder.snapshot().parts)
    torch.compile(lambda x: x.sin(), backend="dynaxla")(torch.randn(3))
    assert len(recorder.snapshot().parts) == before


@torch.no_grad()
def test_stages_have_runs_and_seconds(recorder: Recorder) -> None:
    before = recorder.snapshot().stages
    torch.compile(lambda x: (x * 3).tanh(), backend="dynaxla")(torch.randn(7))
    after = recorder.snapshot().stages
    assert list(after) == ["capture", "passes", "lowering", "xla", "loading"]
    for name in ("capture", "passes", "lowering", "xla"):
        assert after[name].runs == before[name].runs + 1
        assert after[name].seconds > before[name].seconds
    assert after["loading"] == before["loading"]
    assert after["passes"].seconds - before["passes"].seconds < after["capture"].seconds - before["capture"].seconds


def test_the_text_has_the_table_of_the_docs() -> None:
    """Names and labels, and nothing else."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from dynaxla.observe.exposition import write_text

    part = PartCalls("f in m.py", 0, 1.5, (1, *(0 for _ in CALL_SECONDS)), 1, (BucketCalls("8", 1, 1, 5, 8),))
    crossed = {"aten.x": CrossedBytes(8, 16)}
    metrics = Metrics(host_ops={"aten.x": 2}, host_bytes=crossed, cache={"memory": CacheUse(3, 1)}, parts=(part,))
    families = list(text_string_to_metric_families(write_text(metrics)))
    found = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.documentation
    page = (DOCS / "observe.md").read_text(encoding="utf-8").partition("| metric | |")[2].partition("\n\n")[0]
    listed = re.findall(
        r"`(dynaxla_\w+)(?:\{([\w,]+)\})?`", "".join(line.split("|")[1] for line in page.splitlines()[2:])
    )
    assert {name: set(filter(None, labels.split(","))) for name, labels in listed} == found


def test_every_number_of_the_metrics_is_exported() -> None:
    pytest.importorskip("prometheus_client")
    from dynaxla.observe.exposition import COUNTERS

    assert set(COUNTERS) == {each.name for each in dataclasses.fields(Metrics) if type(each.default) is int}


@torch.no_grad()
def test_any_process_has_the_text(recorder: Recorder) -> None:
    pytest.importorskip("prometheus_client")
    compile_counted(lambda x: x.sin() * 4)(torch.randn(3))
    text = dynaxla.prometheus_text()
    assert f"dynaxla_compiles_total {recorder.snapshot().compiles:.1f}" in text
    assert re.search(r'dynaxla_call_seconds_bucket\{function=".*",le="\+Inf",part="\d+"\} 1.0', text)
    assert 'dynaxla_cache_misses_total{tier="memory"}' in text


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("dynaxla.observe.exposition"):
            raise ModuleNotFoundError("No module named 'prometheus_client'", name="prometheus_client")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(VersionError, match=r"pip install 'dynaxla\[metrics\]'"):
        dynaxla.prometheus_text()
