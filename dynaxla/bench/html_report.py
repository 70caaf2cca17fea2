"""A record as one HTML page: no script, no other file, readable on a phone and on a wide screen, in light and dark."""

from __future__ import annotations

import shlex
from html import escape
from pathlib import Path

from dynaxla.bench.record_comparison import Change, compare_records
from dynaxla.bench.records import BenchRecord, CaseResult
from dynaxla.bench.report_charts import draw_latencies, draw_speedups, draw_stages, draw_waste
from dynaxla.bench.result_tables import describe_run, make_rows, write_number
from dynaxla.observe.html_page import make_html, write_table

_STYLE = """
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; margin-top: 1rem; }
figure { margin: 0; padding: .8rem; background: var(--panel); border-radius: 6px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .5rem; } figcaption small { font-weight: 400; color: var(--dim); display: block; }
.row { display: grid; grid-template-columns: minmax(6rem, 26%) 1fr 4.2rem; gap: .5rem; align-items: center; margin: .35rem 0; }
.name { overflow-wrap: anywhere; font-size: .87rem; line-height: 1.2; }
.value { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.track { position: relative; height: 1.1rem; } .track i { position: absolute; display: block; }
.bar { top: 0; height: 100%; border-radius: 2px; min-width: 1px; }
.spread { top: 50%; height: 2px; min-width: 2px; background: var(--text); }
.one { top: -3px; bottom: -3px; width: 0; border-left: 1px dashed var(--text); }
.stack { display: flex; height: 100%; } .track .part { position: static; height: 100%; }
.plot { position: relative; height: 11rem; border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.plot svg { width: 100%; height: 100%; display: block; } .plot line { stroke: var(--line); vector-effect: non-scaling-stroke; }
.plot polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.marks span { position: absolute; right: .2rem; font-size: .75rem; color: var(--dim); transform: translateY(-1.1rem); }
.marks span:first-child { transform: none; } .true { fill: var(--true); } .padded { fill: var(--padded); }
.axis { display: flex; justify-content: space-between; font-size: .8rem; color: var(--dim); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin-top: .5rem; font-size: .83rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
"""


def write_report_page(record: BenchRecord, path: Path, before: BenchRecord | None = None) -> None:
    """Writes the page.

    Args:
        before: an earlier record, with which this one is compared.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make_page(record, before), encoding="utf-8")


def make_page(record: BenchRecord, before: BenchRecord | None = None) -> str:
    """The page as HTML."""
    changes = "" if before is None else _write_changes(compare_records(before, record), before)
    sections = "".join(_write_case(case) for case in record.cases)
    body = (
        f"<h1>dynaxla bench</h1><p>{escape(record.made)} UTC. {escape(describe_run(record))}</p>"
        f"<p><code>{escape(shlex.join(record.command))}</code></p>{changes}{sections}"
    )
    return make_html(f"dynaxla bench, {record.made}", body, _STYLE)


def _write_case(case: CaseResult) -> str:
    headings, rows = make_rows(case)
    failures = "".join(
        f'<p class="bad">{escape(each.name)}: {escape(each.check.message)}</p>'
        for each in case.results
        if each.check.is_bad
    )
    bad = [each.check.is_bad for each in case.results]
    figures = "".join(draw(case) for draw in (draw_speedups, draw_latencies, draw_stages, draw_waste))
    inputs = f"; {len(case.inputs)} calls of sizes that vary" if len(case.inputs) > 1 else ""
    return (
        f"<section><h2>{escape(case.name)}</h2><p>{escape(case.about + inputs)}</p>{failures}"
        f'{write_table(headings, rows, ["bad" if each else "" for each in bad])}<div class="figures">{figures}</div></section>'
    )


def _write_changes(changes: list[Change], before: BenchRecord) -> str:
    rows = [
        [
            each.case,
            each.backend,
            *("" if value is None else write_number(value.median) for value in (each.before, each.after)),
            f"{each.factor:.2f}" if each.factor else "",
            each.verdict,
        ]
        for each in changes
    ]
    headings = ["case", "backend", "before", "after", "change", "verdict"]
    kinds = ["bad" if each.is_bad else "good" if each.verdict in ("faster", "right") else "" for each in changes]
    about = f"{before.made} UTC. {describe_run(before)}. Speed-ups, or milliseconds of the baseline."
    return f"<section><h2>Compared with</h2><p>{escape(about)}</p>{write_table(headings, rows, kinds)}</section>"
