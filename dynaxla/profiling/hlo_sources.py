"""Which module and line of the user's program each instruction of an optimized HLO module comes from, by its metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dynaxla.lowering.locations import find_call, split_name

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(r"^ *(ROOT )?%([\w.\-]+) = (.*)$", re.M)
_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.\-]+)")
_CALLER = re.compile(r"^ *(?:ROOT )?%([\w.\-]+) = .*? (?:while|conditional|call)\(", re.M)
_OPERANDS = re.compile(r"%([\w.\-]+)")
_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$", re.M)
_FIELD = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True, slots=True)
class OpSource:
    """Where an instruction comes from.

    Attributes:
        module: path of the user's module, "layers.0.attention", with "/backward" behind it in a backward; "" for none.
        op: the op, "addmm".
        call: its number among the calls of the graph, "7"; "7_0_5" within the sub-graphs of call 7.
        file: of the user's line; "" where it is not known.
        line: its number.
        outer: the loop, branch or other call with sub-graphs that it is within; None for none.
    """

    module: str
    op: str
    call: str
    file: str = ""
    line: int = 0
    outer: OpSource | None = None

    @property
    def place(self) -> str:
        """The file and the line; "" where they are not known."""
        return f"{self.file}:{self.line}" if self.file else ""


def read_sources(hlo: str) -> dict[str, OpSource]:
    """The sources of a module's instructions, by name.

    A fusion that bears none has that of the last instruction of its computation that has one, of the root if it can be. What
    XLA puts in by itself, a copy, say, has that of its operand.
    """
    lines = _Lines(hlo)
    computations = dict(_COMPUTATION.findall(hlo))
    found: dict[str, OpSource] = {}
    for body in computations.values():
        for _, name, text in _INSTRUCTION.findall(body):
            if (source := lines.source_of(text)) is not None:
                found[name] = source
    for body in computations.values():
        for _, name, text in _INSTRUCTION.findall(body):
            if name not in found and (source := _inherit(text, found, computations)) is not None:
                found[name] = source
    return _nest(found)


def _nest(found: Mapping[str, OpSource]) -> dict[str, OpSource]:
    """The sources with the innermost call that each is within, where an instruction has that call's line."""
    calls: dict[str, OpSource] = {}

    def nest(source: OpSource) -> OpSource:
        call = source.call.rsplit("_", 2)[0]
        return replace(source, outer=calls.get(call, source.outer)) if call != source.call else source

    for source in sorted(found.values(), key=lambda source: (source.call.count("_"), not source.file)):
        calls.setdefault(source.call, nest(source))
    return {name: nest(source) for name, source in found.items()}


def list_callers(hlo: str) -> list[str]:
    """The names of a module's loops, branches and calls, which wait for the computations that they call."""
    return _CALLER.findall(hlo)


def _inherit(text: str, found: Mapping[str, OpSource], computations: Mapping[str, str]) -> OpSource | None:
    called = [name for name in _CALLED.findall(text) if name in computations]
    inner = [each[1] for name in called for each in reversed(_INSTRUCTION.findall(computations[name]))]
    operands = _OPERANDS.findall(text.partition("metadata=")[0])
    return next((found[name] for name in (*inner, *operands) if name in found), None)


class _Lines:
    """The tables of files, lines and frames at a module's head."""

    def __init__(self, hlo: str) -> None:
        head = hlo.partition("\n%")[0]
        self._files = {number: name for number, name, _ in _rows(head, "FileNames")}
        self._locations = {number: _fields(given) for number, _, given in _rows(head, "FileLocations")}
        self._frames = {number: _fields(given) for number, _, given in _rows(head, "StackFrames")}

    def source_of(self, text: str) -> OpSource | None:
        named = _NAME.search(text)
        if named is None:
            return None
        outer, own = split_name(named[1])
        frame = _FRAME.search(text)
        place = self._locations.get(self._frames.get(frame[1], {}).get("file_location_id", ""), {}) if frame else {}
        file = self._files.get(place.get("file_name_id", ""), "")
        return _make_source(own, file, int(place.get("line", 0)), _make_source(outer))


def _make_source(name: str, file: str = "", line: int = 0, outer: OpSource | None = None) -> OpSource | None:
    call = find_call(name)
    module, _, op = name.rpartition("/")
    return None if call is None else OpSource(module, op.rpartition(".")[0], call, file, line, outer)


def _rows(head: str, table: str) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = _ROW.findall(head.partition(f"{table}\n")[2].partition("\n\n")[0])
    return rows


def _fields(text: str) -> dict[str, str]:
    return dict(_FIELD.findall(text))
