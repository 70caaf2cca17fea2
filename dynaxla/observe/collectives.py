"""The collectives of an optimized program, read from its HLO text. A pure function of the text, for any target."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from dynaxla.types import Groups

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_RESULT = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_CALLED = re.compile(r"\b(?:body|calls|to_apply|\w+_computation)=%?([\w.\-]+)|\b\w+_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of `KINDS`.
        shape: of its result on one device, as HLO writes it: "f32[8,16]", several joined by ", ".
        nbytes: bytes of the result on one device.
        groups: the devices, by number, that take part together; of a collective-permute pairs of source and target; empty:
            all of them.
        runs: how often a run of the program runs it: in a loop as often as that, where XLA says how often it is, else once.
    """

    kind: str
    shape: str
    nbytes: int
    groups: Groups
    runs: int = 1

    def __str__(self) -> str:
        among = f" among {len(self.groups[0])}" if self.groups and self.kind != "collective-permute" else ""
        times = f", {self.runs} times" if self.runs > 1 else ""
        return f"{self.kind} {self.shape}, {self.nbytes} bytes{among}{times}"


def list_collectives(hlo_text: str) -> Sequence[Collective]:
    """The collectives of a program in the order of its text.

    An asynchronous one counts once, by its start.

    Args:
        hlo_text: the optimized modules, as `hlo_text()` of an executable gives them.
    """
    return tuple(_list(hlo_text))


def count_group(collective: Collective, devices: int) -> int:
    """The number of devices that take part together in a collective of a program for so many devices."""
    if collective.kind == "collective-permute":
        return 2
    return len(collective.groups[0]) if collective.groups else devices


def count_sent_bytes(collective: Collective, devices: int) -> float:
    """The bytes that each device sends at least, in a program for so many devices: those of a ring, of all runs together."""
    return collective.runs * collective.nbytes * _sent_share(collective.kind, count_group(collective, devices))


def _sent_share(kind: str, group: int) -> float:
    """What a device sends of a collective, as a share of its result's bytes."""
    others = (group - 1) / group
    if kind == "all-reduce":
        return 2 * others
    if kind == "reduce-scatter":
        return group - 1
    return 1.0 if kind in _SENT_WHOLE else others


_SENT_WHOLE = ("collective-permute", "collective-broadcast", "ragged-all-to-all")


def _list(hlo_text: str) -> Iterator[Collective]:
    for module in re.split(r"^(?=HloModule )", hlo_text, flags=re.MULTILINE):
        runs = _count_runs(module)
        for computation, line in _instructions(module):
            found = _RESULT.search(line)
            if found is not None:
                result, kind, start = found.groups()
                arrays: Sequence[tuple[str, str]] = _ARRAY.findall(result)
                if start and kind != "all-reduce" and len(arrays) > 1:
                    arrays = _started(arrays, kind)
                shape = ", ".join(f"{dtype}[{sizes}]" for dtype, sizes in arrays)
                nbytes = sum(_count_bytes(*each) for each in arrays)
                yield Collective(kind, shape, nbytes, _groups(line), runs(computation))


def _instructions(module: str) -> Iterator[tuple[str, str]]:
    """The lines of a module's text, each with the name of its computation."""
    computation = ""
    for line in module.splitlines():
        begun = _COMPUTATION.match(line)
        computation = computation if begun is None else begun[1]
        yield computation, line


def _count_runs(module: str) -> Callable[[str], int]:
    """How often a computation of a module runs, by its name."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for caller, line in _instructions(module):
        trips = _TRIPS.search(line)
        times = int(trips[1]) if trips is not None else 1
        for single, several in _CALLED.findall(line):
            for name in re.findall(r"[\w.\-]+", single or several):
                calls.setdefault(name, []).append((caller, times))

    @cache
    def count(name: str) -> int:
        return sum(count(caller) * times for caller, times in calls.get(name, ())) if name in calls else 1

    return count


def _started(arrays: Sequence[tuple[str, str]], kind: str) -> Sequence[tuple[str, str]]:
    """The results of a start, which gives its operands, its results and, for a permute, two numbers of its context."""
    if kind == "collective-permute":
        arrays = [each for each in arrays if each != ("u32", "")]
    return arrays[len(arrays) // 2 :]


def _count_bytes(dtype: str, sizes: str) -> int:
    digits = _BITS.search(dtype)
    bits = 8 if dtype == "pred" or digits is None else int(digits.group())
    return math.prod(map(int, filter(None, sizes.split(",")))) * bits // 8


def _groups(line: str) -> Groups:
    listed = _LISTED.search(line)
    if listed is not None:
        return tuple(
            tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed.group(1)) if group
        )
    named = _NAMED.search(line)
    if named is not None:
        return _named_groups(*named.groups())
    iota = _IOTA.search(line)
    if iota is None:
        return ()
    sizes, dims, order = (tuple(map(int, text.split(","))) if text else () for text in iota.groups())
    return _cut(_transpose(dims, order or tuple(range(len(dims)))), sizes[-1])


def _named_groups(mesh: str, axes: str) -> Groups:
    """Groups along axes of a mesh: `mesh['x'=2,'y'=4] {'x'}`, or along a part of an axis: `{'y':(2)2}`."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    cut = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(axes)}
    dims: list[int] = []
    taken: dict[str, int] = {}
    for name, size in sizes.items():
        before, width = cut.get(name, (1, 1))
        taken[name] = len(dims) + 1
        dims += [before, width, size // (before * width)]
    along = [taken[name] for name in cut]
    others = [dim for dim in range(len(dims)) if dim not in along]
    return _cut(_transpose(dims, [*others, *along]), math.prod(dims[dim] for dim in along))


def _cut(numbers: Sequence[int], width: int) -> Groups:
    return tuple(tuple(numbers[first : first + width]) for first in range(0, len(numbers), width))


def _transpose(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """The numbers 0, 1, ... in an array of these dims, read with its dims in an order."""
    steps = [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]
    numbers = [0]
    for dim in order:
        numbers = [number + place * steps[dim] for number in numbers for place in range(dims[dim])]
    return numbers
