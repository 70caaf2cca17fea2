"""What is written of device ops: tables by the user's modules, lines and ops, and events in the traces of torch's profiler."""

from __future__ import annotations

import gzip
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dynaxla.profiling.device_ops import DeviceOp

_PROCESS = "PJRT"
"""The name of the process that the lanes of devices belong to."""

_ROWS = 12
NOWHERE = "(no line of the program)"


def group_time(ops: Iterable[DeviceOp], by: Callable[[DeviceOp], str]) -> dict[str, float]:
    """Nanoseconds by what `by` says of an op, the most first."""
    spent: defaultdict[str, float] = defaultdict(float)
    for op in ops:
        spent[by(op)] += op.self_ns
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def module_of(op: DeviceOp) -> str:
    """The user's module that an op computes for."""
    return NOWHERE if op.source is None else op.source.module or "(the model itself)"


def line_of(op: DeviceOp) -> str:
    """The user's line that an op comes from."""
    return NOWHERE if op.source is None else op.source.place or NOWHERE


def op_of(op: DeviceOp) -> str:
    """The op of PyTorch that an instruction computes."""
    return op.name if op.source is None else op.source.op


def write_device_time(ops: Sequence[DeviceOp], seconds: float, reading_s: float) -> str:
    """The tables, and the share of the time that is attributed.

    Args:
        seconds: of the profiled block.
        reading_s: of reading what the profilers recorded.
    """
    total = sum(op.self_ns for op in ops)
    known = sum(op.self_ns for op in ops if op.source is not None)
    out = Console(file=io.StringIO(), width=120)
    out.print(
        f"{seconds * 1e3:.1f} ms by the clock; devices computed {total / 1e6:.1f} ms in {len(ops)} instructions, "
        f"{known / max(total, 1):.0%} of it known by module; reading the profile took {reading_s:.1f} s"
    )
    for title, by in (("module", module_of), ("line", line_of), ("op", op_of)):
        table = Table("ms", "share", title, title=f"device time by {title}", title_justify="left")
        for name, spent in list(group_time(ops, by).items())[:_ROWS]:
            table.add_row(f"{spent / 1e6:.2f}", f"{spent / max(total, 1):.1%}", name)
        out.print(table)
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    return text


def add_device_ops(trace: Path, ops: Sequence[DeviceOp]) -> None:
    """Adds device ops to a trace of Chrome's format, which Perfetto and chrome://tracing open, in place.

    Args:
        trace: a file of JSON, compressed if its name ends in ".gz".
    """
    content = json.loads(_open(trace, "rt").read())
    content["traceEvents"] += _events(ops, int(content.get("baseTimeNanoseconds", 0)))
    with _open(trace, "wt") as file:
        json.dump(content, file)


def _open(trace: Path, mode: str) -> Any:
    return gzip.open(trace, mode) if trace.suffix == ".gz" else trace.open(mode.removesuffix("t"), encoding="utf-8")


def _events(ops: Sequence[DeviceOp], base_ns: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": _PROCESS}}
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(op.lane for op in ops))}
    for lane, number in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": number, "args": {"name": lane}}
    for op in ops:
        source = op.source
        where = {} if source is None else {"module": source.module, "op": source.op, "line": source.place}
        if source is not None and source.outer is not None:
            where["within"] = f"{source.outer.op} {source.outer.place}"
        yield {
            "ph": "X",
            "cat": "kernel",
            "name": op.name,
            "pid": _PROCESS,
            "tid": lanes[op.lane],
            "ts": (op.start_ns - base_ns) / 1000,
            "dur": op.duration_ns / 1000,
            "args": {"program": op.program, **where},
        }
