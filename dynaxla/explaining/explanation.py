"""`dynaxla.explain`: where the time of a function's calls goes, and what to change, in order."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dynaxla.cache.environment_key import versions
from dynaxla.errors import OptionError
from dynaxla.explaining.account import Account
from dynaxla.explaining.described_parts import OpWork, describe_parts, write_bytes
from dynaxla.explaining.measured_calls import MeasuredCalls, forget_captures, measure_calls
from dynaxla.explaining.slowdowns import Slowdown, find_all
from dynaxla.observe.graph_breaks import breaks_without_graph
from dynaxla.observe.html_page import make_html, write_table
from dynaxla.profiling.device_time import group_time, line_of, module_of, op_of
from dynaxla.programs.miss_policy import is_compiled
from dynaxla.runtime_state import read_metrics, shared_here

_ROWS = 10


@dataclass(frozen=True, slots=True)
class OpCost:
    """What an op of one line and module costs in a call.

    Attributes:
        op, module, line: as profiles name them.
        device_ms: of its instructions.
        flops, nbytes: of its work, see `OpWork`; 0 where it is not known.
    """

    op: str
    module: str
    line: str
    device_ms: float
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printing it shows it.

    Attributes:
        findings: what costs time, the costliest first.
        calls: what was measured.
        account: what else is said of these calls: graphs, programs, who lowers what, buckets, memory.
    """

    findings: list[Slowdown]
    calls: MeasuredCalls
    account: Account

    def list_costs(self) -> list[OpCost]:
        """The ops by the time of the devices, the most first."""
        work: dict[tuple[str, ...], list[OpWork]] = {}
        for each in (each for part in self.account.parts for each in part.work):
            work.setdefault((each.op, each.module, each.place), []).append(each)
            work.setdefault((each.op, each.module), []).append(each)  # a program that was loaded has its maker's lines
        times = group_time(self.calls.ops, lambda op: "\0".join((op_of(op), module_of(op), line_of(op))))
        sources = {(op_of(o), module_of(o), line_of(o)): o.source for o in self.calls.ops if o.source is not None}
        found = []
        for name, spent in times.items():
            op, module, line = name.split("\0")
            source = sources.get((op, module, line))
            keys = [] if source is None else [(source.op, source.module, source.place), (source.op, source.module)]
            known = next((work[key] for key in keys if key in work), [])
            flops, nbytes = (known[0].flops, known[0].nbytes) if len(known) == 1 else (0, 0)
            found.append(OpCost(op, module, line, spent / 1e6, flops, nbytes))
        return found

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values; milliseconds are of one call."""
        calls = self.calls
        tables = {"module": module_of, "line": line_of, "op": op_of}
        return {
            "first_call_ms": calls.seconds[0] * 1e3,
            "call_ms": calls.steady_s * 1e3,
            "eager_ms": None if calls.eager_s is None else calls.eager_s * 1e3,
            "device_ms": calls.device_ms,
            "findings": [asdict(finding) for finding in self.findings],
            **self.account.as_dict(),
            "costs": [asdict(cost) for cost in self.list_costs()],
            "device_time_ms": {
                by: {name: ns / 1e6 for name, ns in group_time(calls.ops, key).items()} for by, key in tables.items()
            },
            "versions": dict(versions()),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def write_html(self, file: str | Path) -> None:
        """Writes a page without scripts, for any width.

        Raises:
            OSError: the file cannot be written.
        """
        findings = "".join(
            f"<li><b>{escape(_write_cost(each))}, {each.kind}</b>: {escape(each.what)}"
            f"<small>{escape(each.where)}</small><small>{escape(each.advice)}</small></li>"
            for each in self.findings
        )
        sections = "".join(
            f"<section><h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul></section>"
            for title, lines in self.account.list_sections().items()
        )
        body = (
            f"<h1>dynaxla explain</h1><p>{escape(self._write_first_line())}</p>"
            f"<section><h2>what to change, in order</h2><ol>{findings or '<li>nothing was found</li>'}</ol></section>"
            f"<section><h2>device time</h2>{write_table(_HEADINGS, self._make_rows())}</section>{sections}"
        )
        Path(file).write_text(make_html("dynaxla explain", body), encoding="utf-8")

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=140)
        console.print(self._write_first_line(), highlight=False, markup=False)
        table = Table("ms", "kind", "what", "where", "what to change", title="what to change, in order")
        for each in self.findings:
            cost = _write_cost(each).replace(" ms", "")
            table.add_row(cost, each.kind, *map(_plain, (each.what, each.where, each.advice)))
        console.print(table if self.findings else "nothing to change was found")
        table = Table(*_HEADINGS, title="device time")
        for row in self._make_rows():
            table.add_row(*map(_plain, row))
        console.print(table)
        return f"{out.getvalue()}{self.account}\n"

    def _write_first_line(self) -> str:
        calls = self.calls
        eager = "" if calls.eager_s is None else f", eager {calls.eager_s * 1e3:.2f} ms"
        return (
            f"a call: {calls.steady_s * 1e3:.2f} ms, of which devices compute {calls.device_ms:.2f} ms{eager}; "
            f"the first: {calls.seconds[0]:.1f} s"
        )

    def _make_rows(self) -> list[list[str]]:
        """The costliest ops."""
        whole = max(self.calls.device_ms, 1e-9)
        return [
            [
                each.op,
                f"{each.device_ms:.2f}",
                f"{each.device_ms / whole:.0%}",
                f"{each.flops:.2g}" if each.flops else "",
                write_bytes(each.nbytes) if each.nbytes else "",
                each.module,
                each.line,
            ]
            for each in self.list_costs()[:_ROWS]
        ]


_HEADINGS = ("op", "ms", "share", "flops", "bytes", "module", "line")


def _write_cost(found: Slowdown) -> str:
    return f"{found.cost_ms:.2f} ms" + ("" if found.basis == "measured" else " (estimated)")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def explain(
    function: Callable[..., Any],
    *args: Any,
    calls: int = 4,
    backward: bool = False,
    wrap: bool = True,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Says what costs time in a function's calls, and what to change: `print(dynaxla.explain(model, x))`.

    The function is compiled, called some times, and profiled in one more call. Captures that the process has are forgotten.

    Args:
        function: a module or a function.
        args, kwargs: of each call. What changes from call to call, the function changes itself.
        calls: how many, 2 at least: later ones show what is compiled again.
        backward: whether the sum of the results is differentiated in each call.
        wrap: whether the function is compiled; False for one that calls what is compiled, as a whole step of training. One that
            torch.compile gave is called as it is.
        options: of the backend.

    Raises:
        OptionError: there is less than two calls, or an option is wrong.
        ProfileError: the devices cannot be profiled in this process.
    """
    if calls < 2:
        raise OptionError(f"calls={calls}", "two calls show what is compiled again")
    forget_captures()
    before = list(shared_here().parts.values())
    known, outside = set(map(id, before)), set(breaks_without_graph(read_metrics().captured))
    compiled, eager = function, None
    if wrap and not is_compiled(function):
        given = {**(options or {}), "call_metrics": True}
        compiled, eager = torch.compile(function, backend="dynaxla", options=given), function
    measured = measure_calls(compiled, eager, args, kwargs, calls=calls, backward=backward)
    new = [each for each in breaks_without_graph(read_metrics().captured) if each not in outside]
    parts = [part for part in shared_here().parts.values() if id(part) not in known]
    account = Account(measured.whole, new, describe_parts(parts, in_full=True), {})
    return Explanation(find_all(measured), measured, account)
