"""`dynaxla.explain`: where the time of a function's calls goes, and what to change, in order."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dynaxla.cache.environment_key import versions
from dynaxla.errors import OptionError
from dynaxla.explaining.measured_calls import MeasuredCalls, forget_captures, measure_calls
from dynaxla.explaining.slowdowns import Slowdown, find_all
from dynaxla.profiling.device_time import group_time, line_of, module_of, op_of
from dynaxla.programs.miss_policy import is_compiled

_ROWS = 10


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. Printing it shows it.

    Attributes:
        findings: what costs time, the costliest first.
        calls: what was measured.
    """

    findings: list[Slowdown]
    calls: MeasuredCalls

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values; milliseconds are of one call."""
        calls, whole = self.calls, self.calls.whole
        tables = {"module": module_of, "line": line_of, "op": op_of}
        return {
            "first_call_ms": calls.seconds[0] * 1e3,
            "call_ms": calls.steady_s * 1e3,
            "eager_ms": None if calls.eager_s is None else calls.eager_s * 1e3,
            "device_ms": calls.device_ms,
            "graphs": [str(capture) for capture in whole.captured],
            "programs": {"compiled": whole.compiles, "loaded": whole.loads, "of_weights": whole.folds},
            "stages_s": {name: use.seconds for name, use in whole.stages.items()},
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "device_time_ms": {
                by: {name: ns / 1e6 for name, ns in group_time(calls.ops, key).items()} for by, key in tables.items()
            },
            "versions": dict(versions()),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def write_html(self, file: str | Path) -> None:
        """Writes a page without scripts.

        Raises:
            OSError: the file cannot be written.
        """
        console = self._render(Console(record=True, file=io.StringIO(), width=140))
        Path(file).write_text(console.export_html(), encoding="utf-8")

    def __str__(self) -> str:
        console = self._render(Console(file=io.StringIO(), width=140))
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text

    def _render(self, console: Console) -> Console:
        calls, whole = self.calls, self.calls.whole
        eager = "" if calls.eager_s is None else f", eager {calls.eager_s * 1e3:.2f} ms"
        console.print(
            f"a call: {calls.steady_s * 1e3:.2f} ms, of which devices compute {calls.device_ms:.2f} ms{eager}; "
            f"the first: {calls.seconds[0]:.1f} s",
            f"graphs: {len(whole.captured)}, programs: {whole.compiles} compiled, {whole.loads} loaded",
            *map(str, whole.captured),
            sep="\n",
            highlight=False,
            markup=False,
        )
        table = Table("ms", "kind", "what", "where", "what to change", title="what to change, in order")
        for each in self.findings:
            cost = f"{each.cost_ms:.2f}" + ("" if each.basis == "measured" else " (estimated)")
            table.add_row(cost, each.kind, _plain(each.what), _plain(each.where), _plain(each.advice))
        console.print(table if self.findings else "nothing to change was found")
        _print_device_time(console, calls)
        return console


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _print_device_time(console: Console, calls: MeasuredCalls) -> None:
    table = Table("ms", "share", "op", "module", "line", title="device time")

    def key(op: Any) -> str:
        return "\0".join((op_of(op), module_of(op), line_of(op)))

    for name, spent in list(group_time(calls.ops, key).items())[:_ROWS]:
        table.add_row(
            f"{spent / 1e6:.2f}", f"{spent / 1e6 / max(calls.device_ms, 1e-9):.0%}", *map(_plain, name.split("\0"))
        )
    console.print(table)


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
    compiled, eager = function, None
    if wrap and not is_compiled(function):
        given = {**(options or {}), "call_metrics": True}
        compiled, eager = torch.compile(function, backend="dynaxla", options=given), function
    measured = measure_calls(compiled, eager, args, kwargs, calls=calls, backward=backward)
    return Explanation(find_all(measured), measured)
