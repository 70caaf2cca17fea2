"""Records for tests, by hand."""

from __future__ import annotations

from collections.abc import Sequence

from dynaxla.bench.answers import Check
from dynaxla.bench.records import BackendResult, BenchRecord, CaseResult, StartTimes

STAGES = {"capture": 0.1, "autograd": 0.2, "lowering": 0.3, "compile": 0.4, "rest": 0.5}


def make_result(name: str, samples_s: Sequence[float], **fields: object) -> BackendResult:
    start = StartTimes(1.5, STAGES, compiled=2, before_bytes=200_000_000, peak_bytes=300_000_000, own_process=True)
    given = {"check": Check("same", 1e-6), "first": start, "second": start, "programs": [2], **fields}
    return BackendResult(name, samples_s=list(samples_s), first_pass_s=[0.5], **given)  # type: ignore[arg-type]


def make_record(*cases: CaseResult) -> BenchRecord:
    machine = {"processor": "a <processor>", "cores": 2, "threads": 2, "load": 0.5}
    return BenchRecord(["bench", "tiny"], cases, "2026-01-01 00:00:00", machine, {"torch": "2.13.0"}, "abc")


def make_case(*results: BackendResult, name: str = "tiny", **fields: object) -> CaseResult:
    return CaseResult(name, results, **fields)  # type: ignore[arg-type]
