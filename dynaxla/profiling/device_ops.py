"""What a device computed while a profile ran: the events of PJRT's profiler, each with its source in the user's program."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.profiler import ProfileData

from dynaxla.profiling.hlo_sources import OpSource, list_callers, read_sources

_OP, _PROGRAM = "hlo_op", "hlo_module"
"""XLA's names of an event's fields."""


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """An instruction that a device ran.

    Attributes:
        name: the instruction's name in the optimized HLO.
        program: the name of its module.
        source: where in the user's program it comes from; None where XLA's metadata do not say.
        lane: the device, or the thread of the host, that ran it.
        start_ns: by the clock, since 1970.
        duration_ns: from its begin to its end, with those that it calls.
        self_ns: without those that it calls, as the body of a loop, on whatever lane these run.
    """

    name: str
    program: str
    source: OpSource | None
    lane: str
    start_ns: float
    duration_ns: float
    self_ns: float


def read_device_ops(profile: bytes, programs: Mapping[str, str]) -> list[DeviceOp]:
    """The instructions in a profile, in the order of their lanes and begins.

    Args:
        profile: what PJRT's profiler gave, an XSpace.
        programs: the optimized HLO of the programs, by the names of their modules.
    """
    planes = list(ProfileData.from_serialized_xspace(profile).planes)
    begin = next((int(dict(p.stats)["profile_start_time"]) for p in planes if p.name == "Task Environment"), 0)
    sources = {name: read_sources(hlo) for name, hlo in programs.items()}
    found: list[DeviceOp] = []
    for plane in planes:
        for number, line in enumerate(plane.lines):
            lane = plane.name if plane.name.startswith("/device:") else f"{plane.name} thread {number}"
            ops = sorted(_ops(line, lane, begin, sources), key=lambda op: (op.start_ns, -op.duration_ns))
            found += _subtract_inner(ops)
    return subtract_waits(found, {(name, each) for name, hlo in programs.items() for each in list_callers(hlo)})


def list_programs(profile: bytes) -> set[str]:
    """The names of the modules whose instructions a profile has."""
    lines = (line for plane in ProfileData.from_serialized_xspace(profile).planes for line in plane.lines)
    return {
        str(fields[_PROGRAM]) for line in lines for event in line.events if _PROGRAM in (fields := dict(event.stats))
    }


def _ops(line: Any, lane: str, begin: int, sources: Mapping[str, Mapping[str, OpSource]]) -> Iterator[DeviceOp]:
    for event in line.events:
        fields = dict(event.stats)
        if _OP in fields:
            name, program = str(fields[_OP]), str(fields.get(_PROGRAM, ""))
            source, spent = sources.get(program, {}).get(name), float(event.duration_ns)
            yield DeviceOp(name, program, source, lane, begin + float(event.start_ns), spent, spent)


def _subtract_inner(ops: Sequence[DeviceOp]) -> list[DeviceOp]:
    """Ops of one lane, in the order of their begins, without the time of those that lie within them."""
    own = [op.self_ns for op in ops]
    open_ops: list[int] = []
    for number, op in enumerate(ops):
        while open_ops and ops[open_ops[-1]].start_ns + ops[open_ops[-1]].duration_ns <= op.start_ns:
            open_ops.pop()
        if open_ops:
            own[open_ops[-1]] -= op.duration_ns
        open_ops.append(number)
    return [replace(op, self_ns=max(spent, 0.0)) for op, spent in zip(ops, own, strict=True)]


def subtract_waits(ops: Iterable[DeviceOp], callers: set[tuple[str, str]]) -> list[DeviceOp]:
    """Ops in their order; loops, branches and calls without the time in which they wait for what other threads compute.

    Args:
        callers: the programs and names of those that call computations.
    """
    given = list(ops)
    by_program: defaultdict[str, list[DeviceOp]] = defaultdict(list)
    for op in sorted(given, key=lambda op: op.start_ns):
        by_program[op.program].append(op)
    starts = {program: [op.start_ns for op in each] for program, each in by_program.items()}

    def own_time(op: DeviceOp) -> float:
        own, seen, end = op.duration_ns, op.start_ns, op.start_ns + op.duration_ns
        nearby = by_program[op.program]
        for inner in map(nearby.__getitem__, range(bisect_left(starts[op.program], seen), len(nearby))):
            if inner.start_ns >= end:
                break
            if inner.duration_ns < op.duration_ns:  # else it is the op itself, or calls it
                until = min(inner.start_ns + inner.duration_ns, end)
                own -= max(until - max(inner.start_ns, seen), 0.0)
                seen = max(seen, until)
        return own

    return [replace(op, self_ns=own_time(op)) if (op.program, op.name) in callers else op for op in given]
