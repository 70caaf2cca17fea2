"""Plots of a case as HTML that needs no script: bars are boxes whose widths are percentages, so that labels keep their size on
every screen; a distribution is a small SVG between labels of HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from dynaxla.bench.compile_counters import STAGES
from dynaxla.bench.records import BackendResult, CaseResult, StartTimes
from dynaxla.bench.result_tables import write_number
from dynaxla.bench.sample_statistics import find_speedup, padded_ratio, quantile

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
MOST_POINTS = 200
"""Of a line."""


def color_of(case: CaseResult, result: BackendResult) -> str:
    """A backend has one color in all plots of its case."""
    return COLORS[[each.name for each in case.results].index(result.name) % len(COLORS)]


def draw_speedups(case: CaseResult) -> str:
    """A bar for each backend, its quartiles as a line across its end, and a line at the baseline's speed."""
    found = [(each, find_speedup(case, each)) for each in case.results]
    spreads = {each.name: (each, spread) for each, spread in found if spread is not None}
    if len(spreads) < 2:
        return ""
    most = 1.1 * max(spread.high for _, spread in spreads.values())
    rows = []
    for result, spread in spreads.values():
        low, high = 100 * spread.low / most, 100 * spread.high / most
        bar = f'<i class="bar" style="width:{100 * spread.median / most:.2f}%;background:{color_of(case, result)}"></i>'
        line = f'<i class="spread" style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
        one = f'<i class="one" style="left:{100 / most:.2f}%"></i>'
        title = f"{spread.median:.3f}, quartiles {spread.low:.3f} to {spread.high:.3f}"
        rows.append(_row(result.name, bar + line + one, f"{spread.median:.2f}", title))
    return _chart(f"Speed-up against {case.baseline}", "median of rounds, with quartiles; higher is faster", rows)


def draw_latencies(case: CaseResult) -> str:
    """For each backend the share of runs that took at most so long; the time is logarithmic."""
    timed = [each for each in case.results if each.samples_s]
    if not timed:
        return ""
    low = min(quantile(each.samples_s, 0.0) for each in timed) * 1e3
    high = max(quantile(each.samples_s, 0.995) for each in timed) * 1e3
    width = math.log(high / low) or 1.0

    def place(milliseconds: float) -> float:
        return 100 * min(1.0, max(0.0, math.log(max(milliseconds, low) / low) / width))

    lines = []
    for result in timed:
        shares = [step / MOST_POINTS for step in range(MOST_POINTS + 1)]
        points = " ".join(f"{place(1e3 * quantile(result.samples_s, s)):.2f},{100 - 100 * s:.1f}" for s in shares)
        name = f"<title>{escape(result.name)}</title>"
        lines.append(f'<polyline points="{points}" stroke="{color_of(case, result)}">{name}</polyline>')
    grid = "".join(f'<line x1="0" x2="100" y1="{y}" y2="{y}"/>' for y in (5, 50))
    ticks = [low * math.exp(width * step / 4) for step in range(5)]
    axis = "".join(f"<span>{write_number(each)}</span>" for each in ticks)
    body = (
        f'<div class="plot"><div class="marks"><span style="top:5%">p95</span><span style="top:50%">p50</span></div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img">{grid}{"".join(lines)}</svg></div>'
        f'<div class="axis">{axis}</div>{_legend([(each.name, color_of(case, each)) for each in timed])}'
    )
    return _figure("Latency", "share of runs that took at most so many milliseconds", body)


def draw_stages(case: CaseResult) -> str:
    """The first pass of each backend by stage, and behind it the passes of processes that found something stored."""
    shown: list[tuple[str, StartTimes]] = []
    for result in case.results:
        for name, start in (("first", result.first), ("second", result.second), ("captures", result.captures)):
            if start is not None and (start.own_process or name == "first"):
                shown.append((f"{result.name}, {name}", start))
    most = max((start.seconds for _, start in shown), default=0.0)
    if not most:
        return ""
    colors = dict(zip(STAGES, COLORS, strict=False))
    rows = []
    for name, start in shown:
        parts = "".join(
            f'<i class="part" style="width:{100 * seconds / most:.2f}%;background:{colors[stage]}" '
            f'title="{stage} {seconds:.3f} s"></i>'
            for stage, seconds in start.stages.items()
        )
        title = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in start.stages.items())
        rows.append(_row(name, f'<span class="stack">{parts}</span>', f"{write_number(start.seconds)} s", title))
    legend = _legend([(f"{stage}: {what}", colors[stage]) for stage, what in STAGES.items()])
    return _chart("First pass by stage", "seconds; shorter is better", rows, legend)


def draw_waste(case: CaseResult) -> str:
    """For each backend with buckets a column per call, by size: its elements, and above them those that its bucket adds."""
    figures = []
    for result in case.results:
        ratio = padded_ratio(result)
        if ratio is None or not sum(result.programs):
            continue
        calls = sorted(result.elements, key=lambda each: (each[1], each[0]))
        calls = calls[:: max(1, math.ceil(len(calls) / MOST_POINTS))]
        most = max(padded for _, padded in calls)
        wide = 100 / len(calls)
        columns = "".join(
            f'<rect class="padded" x="{place * wide:.3f}" width="{wide:.3f}" y="{100 - 100 * padded / most:.2f}" '
            f'height="{100 * padded / most:.2f}"/><rect class="true" x="{place * wide:.3f}" width="{wide:.3f}" '
            f'y="{100 - 100 * true / most:.2f}" height="{100 * true / most:.2f}"/>'
            for place, (true, padded) in enumerate(calls)
        )
        body = (
            f'<div class="plot"><svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img">{columns}</svg></div>'
            f'<div class="axis"><span>smallest bucket</span><span>largest, {most:,} elements</span></div>'
            + _legend([("of the call", "var(--true)"), ("added by its bucket", "var(--padded)")])
        )
        figures.append(
            _figure(f"Buckets of {result.name}", f"{ratio:.2f} padded elements per true one, all calls", body)
        )
    return "".join(figures)


def _row(name: str, bars: str, value: str, title: str) -> str:
    return (
        f'<div class="row" title="{escape(title)}"><span class="name">{escape(name)}</span>'
        f'<span class="track">{bars}</span><span class="value">{escape(value)}</span></div>'
    )


def _chart(title: str, what: str, rows: Sequence[str], legend: str = "") -> str:
    return _figure(title, what, "".join(rows) + legend)


def _figure(title: str, what: str, body: str) -> str:
    return f"<figure><figcaption>{escape(title)} <small>{escape(what)}</small></figcaption>{body}</figure>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<div class="legend">{shown}</div>'
