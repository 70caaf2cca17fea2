"""A compile that takes long says so on the log: what, how long by stage, and why."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import Tensor, nn

from dynaxla.observe import compile_timing
from dynaxla.observe.compile_timing import CapturedFunction, CompileTiming

LINE = re.compile(
    r"compiled (?P<what>.+) in [\d.]+ s "
    r"\(capture [\d.]+, padding [\d.]+, lowering [\d.]+, XLA [\d.]+\): (?P<why>.+)"
)


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).sum(0)


def factors(x: Tensor) -> Tensor:
    return torch.linalg.lu(x @ x.T)[2]


def _told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [LINE.fullmatch(r.getMessage()) for r in caplog.records if r.name == "dynaxla.compiles"]
    caplog.clear()
    return [(each["what"], each["why"]) for each in found if each is not None]


def test_what_and_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compile_timing, "LONG_S", 0.0)
    what = f"Net.forward in {__file__}"
    compiled = torch.compile(Net(), backend="dynaxla")
    for rows, why in ((5, "a new graph"), (9, "a new graph"), (33, "a new bucket of sizes 48"), (10, None)):
        compiled(torch.randn(rows, 3))
        assert _told(caplog) == ([] if why is None else [(what, why)])
    exact = torch.compile(factors, backend="dynaxla", dynamic=True)
    exact(torch.randn(5, 3))
    (_, first), *_ = _told(caplog)
    assert first.startswith("a new graph; ")
    exact(torch.randn(6, 3))
    (_, second), *_ = _told(caplog)
    assert re.match("a new exact shape of sizes (3, 6|6, 3); ", second)
    assert "linalg" in second


def test_short_compiles_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dynaxla.compiles"):
        CompileTiming(0.1, 0.2, 0.3, 0.4).tell("a graph", "a new graph")
        assert not caplog.records
        CompileTiming(1.0, 0.25, 0.5, 0.75).tell("a graph", "a new graph")
    (record,) = caplog.records
    assert record.getMessage() == (
        "compiled a graph in 2.5 s (capture 1.0, padding 0.2, lowering 0.5, XLA 0.8): a new graph"
    )


def test_capture_is_counted_once() -> None:
    origin = CapturedFunction("a graph", capture_s=3.0)
    assert [origin.take_capture_s(), origin.take_capture_s()] == [3.0, 0.0]
