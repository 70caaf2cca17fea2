"""What costs time in a function's calls, each with what it costs and what to change. One function for each kind."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from dynaxla.explaining.account import read_fallback, write_crossed
from dynaxla.explaining.measured_calls import MeasuredCalls, is_compiling
from dynaxla.profiling.device_ops import DeviceOp
from dynaxla.profiling.profile import HostSpan
from dynaxla.profiling.session import PREFIX

Kind = Literal[
    "graph-break",
    "fallback",
    "recompile",
    "exact-shape",
    "slow-op",
    "unrolled-loop",
    "float64",
    "weights-change",
    "padding",
    "overhead",
]

_REGION = "Torch-Compiled Region"
"""How Dynamo names the ranges of the functions that it captured, in profiles."""

_LEAST_SHARE = 0.1
"""Of a call, below which what costs time on the device or on the host is not told."""

_MANY = 16
"""Instructions of one op from one line, from which on a loop in Python is likely."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Something that costs time.

    Attributes:
        kind: stable, for tools: `--fail-on`.
        what: in one line.
        where: the user's line; "" where it has none.
        cost_ms: of a call, what would be gained if it cost nothing.
        basis: whether the cost was measured by itself, or is computed of other measurements.
        advice: what to change.
    """

    kind: Kind
    what: str
    where: str
    cost_ms: float
    basis: Literal["measured", "estimated"]
    advice: str


def find_all(calls: MeasuredCalls) -> list[Slowdown]:
    """Everything that was found, the costliest first; last the overhead, of which most goes where the others are mended."""
    found = [finding for find in _FINDERS for finding in find(calls)]
    return sorted(found, key=lambda each: (each.kind == "overhead", -each.cost_ms))


def _find_breaks(calls: MeasuredCalls) -> Iterator[Slowdown]:
    """Graph breaks: each costs the time until the next graph's part begins, and what that part adds to its program's run."""
    ended = list(dict.fromkeys(capture.ended for capture in calls.whole.captured if capture.ended is not None))
    gaps = [
        later.start_ms - earlier.end_ms + calls.overhead_ms(later)
        for earlier, later in itertools.pairwise(calls.parts)
        if _region_of(earlier) != _region_of(later)
    ]
    is_by_gap = len(gaps) == len(ended)
    for number, each in enumerate(ended):
        yield Slowdown(
            "graph-break",
            f"the graph ends: {each.reason}",
            each.frame or "",
            gaps[number] if is_by_gap else sum(gaps) / len(ended),
            "measured" if is_by_gap else "estimated",
            "move the line out of the compiled function, or let the value stay a tensor (torch.where, torch.cond)",
        )


def _region_of(part: HostSpan) -> str:
    """The captured function that calls a part, as Dynamo numbers it."""
    return next((name for name in part.within if name.startswith(_REGION)), "")


def _find_fallbacks(calls: MeasuredCalls) -> Iterator[Slowdown]:
    spent: defaultdict[str, float] = defaultdict(float)
    for span in calls.last.spans:
        if "::" in span.name and not any("::" in name or name.startswith(PREFIX) for name in span.within):
            spent[span.name] += span.end_ms - span.start_ms
    for line in dict.fromkeys(calls.whole.fallbacks):
        op, reason, where = read_fallback(line)
        yield Slowdown(
            "fallback",
            f"{op} runs in eager PyTorch: {reason}",
            where,
            spent.get(_name_in_profiles(op), 0.0),
            "measured",
            "use an op with sizes that do not depend on values, or compute it outside of the compiled function",
        )
    for op, count in calls.whole.host_ops.items():
        yield Slowdown(
            "fallback",
            f"the host computed {op} of the device's tensors {count} times: {write_crossed(calls.whole.host_bytes[op])}",
            "",
            spent.get(_name_in_profiles(op), 0.0),
            "measured",
            "move the tensors to the host before, or use an op that the device has (docs/ops.md)",
        )


def _name_in_profiles(op: str) -> str:
    """ "aten::nonzero" of "aten.nonzero.default"."""
    return "::".join(op.split(".")[:2])


def _find_recompiles(calls: MeasuredCalls) -> Iterator[Slowdown]:
    later = list(zip(calls.seconds, calls.changes, strict=True))[1:]
    again = [(seconds, change) for seconds, change in later if is_compiling(change)]
    if not again:
        return
    cost = sum(max(seconds - calls.steady_s, 0.0) for seconds, _ in again) / len(calls.seconds) * 1e3
    reasons = [c.again for _, change in again for c in change.captured if c.again is not None]
    refused = list(dict.fromkeys(calls.whole.exact_shapes))
    count = f"{len(again)} of {len(later)} later calls"
    if reasons:
        what = f"{count} captured the function again: {reasons[-1]}"
        yield Slowdown("recompile", what, "", cost, "measured", _advise_on_guard(reasons[-1]))
    elif refused:
        for line in refused:
            yield _refusal(line, cost / len(refused), f"; {count} compiled")
    else:
        what = f"{count} compiled a program for new sizes"
        yield Slowdown(
            "recompile",
            what,
            "",
            cost,
            "measured",
            "declare the sizes: dynaxla.mark_bucketed, or options={'buckets': ...}",
        )


def _advise_on_guard(reason: str) -> str:
    if re.search(r"lr|learning", reason):
        return "give the learning rate as a tensor: AdamW(parameters, torch.tensor(1e-3))"
    if "size mismatch" in reason or "shape" in reason:
        return "mark the size that varies at the first call: dynaxla.mark_bucketed(x, dim)"
    return "give what changes as a tensor, or keep it the same: Python's numbers, words and flags are guarded"


def _find_refusals(calls: MeasuredCalls) -> Iterator[Slowdown]:
    """Parts that are compiled for each size, whose sizes did not change in these calls."""
    if any(is_compiling(change) for change in calls.changes[1:]):
        return
    whole = calls.whole
    per_program = (whole.compile_s + whole.lowering_s) / max(whole.compiles, 1) * 1e3
    for line in dict.fromkeys(whole.exact_shapes):
        yield _refusal(line, per_program / len(calls.seconds), "; each new size will compile")


def _refusal(line: str, cost: float, then: str) -> Slowdown:
    what, _, where = line.partition("; at ")
    advice = "pass a mask, or use an op that padding does not change (docs/exact_shapes.md)"
    return Slowdown("exact-shape", what + then, where, cost, "estimated", advice)


def _find_slow_ops(calls: MeasuredCalls) -> Iterator[Slowdown]:
    whole_ms = calls.steady_s * 1e3
    groups: defaultdict[tuple[str, str], list[DeviceOp]] = defaultdict(list)
    wide = set(_wide_ops(calls))  # told apart
    for op in calls.ops:
        if op.source is not None and op not in wide:
            groups[op.source.op, op.source.place].append(op)
    for (name, place), ops in groups.items():
        spent = sum(op.self_ns for op in ops) / 1e6
        if spent < _LEAST_SHARE * whole_ms:
            continue
        modules = sorted({op.source.module for op in ops if op.source is not None})
        within = f" of {modules[0]}{f' and {len(modules) - 1} more' if len(modules) > 1 else ''}" if modules[0] else ""
        # Calls of one sub-graph are one: these are no loop in Python.
        numbers = len({c.partition("_")[2] or c for c in (op.source.call for op in ops if op.source is not None)})
        if numbers >= _MANY:
            yield Slowdown(
                "unrolled-loop",
                f"{numbers} calls of {name}{within} come from one line: a loop in Python is a graph of all its steps",
                place,
                spent,
                "measured",
                "compute all steps in one op, or use torch.scan or a nested_compile_region",
            )
        else:
            what = f"{name}{within} takes {spent / max(calls.device_ms, 1e-9):.0%} of the devices' time"
            yield Slowdown("slow-op", what, place, spent, "measured", _advise_on_op(name))


def _advise_on_op(name: str) -> str:
    if name in ("clone", "_to_copy", "copy", "contiguous", "t", "permute", "transpose"):
        return "copy or convert once, before the compiled function is called, not in every call"
    if "conv" in name:
        return "smaller channels or windows, channels-last inputs, or 16-bit floats on an accelerator; see docs/performance.md"
    if name in ("addmm", "mm", "bmm", "linear", "baddbmm"):
        return "torch.set_float32_matmul_precision('high') on an accelerator; larger batches use it better"
    return "is it needed in every call? What does not depend on the inputs can be computed once"


def _find_float64(calls: MeasuredCalls) -> Iterator[Slowdown]:
    ops = _wide_ops(calls)
    spent = sum(op.self_ns for op in ops) / 1e6
    if ops and spent >= _LEAST_SHARE * calls.device_ms:
        first = next((op.source.place for op in ops if op.source is not None and op.source.place), "")
        yield Slowdown(
            "float64",
            f"{len(ops)} instructions compute in float64, and no input is of it",
            first,
            spent / 2,
            "estimated",
            "a numpy array or torch.tensor(..., dtype=float64) widens what it meets: convert it to float32 first",
        )


def _wide_ops(calls: MeasuredCalls) -> list[DeviceOp]:
    """Instructions that give float64, where no tensor that the function is given is of it."""
    if torch.float64 in calls.floats:
        return []
    programs = calls.last.recording.programs.items()
    wide = {(name, found) for name, hlo in programs for found in _WIDE.findall(hlo)}
    return [op for op in calls.ops if (op.program, op.name) in wide]


_WIDE = re.compile(r"%([\w.\-]+) = \(?f64\[[1-9]")


def _find_changing_weights(calls: MeasuredCalls) -> Iterator[Slowdown]:
    later = calls.changes[1:]
    folding = [change for change in later if change.folds or change.fold_loads]
    if later and len(folding) == len(later):
        yield Slowdown(
            "weights-change",
            "what depends on weights alone is computed again in every call: they are written between calls",
            "",
            0.0,
            "estimated",
            "options={'fold_parameters': False}",
        )


def _find_padding(calls: MeasuredCalls) -> Iterator[Slowdown]:
    true, padded = (
        sum(getattr(b, name) for part in calls.whole.parts for b in part.buckets)
        for name in ("true_elements", "padded_elements")
    )
    if true and padded > (1 + _LEAST_SHARE) * true:
        yield Slowdown(
            "padding",
            f"{padded / true:.2f} elements are computed for each that is wanted",
            "",
            calls.device_ms * (1 - true / padded),
            "estimated",
            "finer buckets: options={'buckets': ...}, or 'learned'",
        )


def _find_overhead(calls: MeasuredCalls) -> Iterator[Slowdown]:
    """What is neither the run of a program nor eager: guards, and arguments and results of the first part."""
    if is_compiling(calls.last_change) or not calls.parts:
        return
    guards, first = calls.total_ms("TorchDynamo Cache Lookup"), calls.overhead_ms(calls.parts[0])
    if guards + first >= 3 * _LEAST_SHARE * calls.steady_s * 1e3:
        yield Slowdown(
            "overhead",
            f"guards take {guards:.2f} ms of the host, arguments and results {first:.2f} ms",
            "",
            guards + first,
            "measured",
            "larger batches; fewer graphs; compile the whole step (docs/whole_step.md)",
        )


_FINDERS: tuple[Callable[[MeasuredCalls], Iterator[Slowdown]], ...] = (
    _find_breaks,
    _find_fallbacks,
    _find_recompiles,
    _find_refusals,
    _find_slow_ops,
    _find_float64,
    _find_changing_weights,
    _find_padding,
    _find_overhead,
)
