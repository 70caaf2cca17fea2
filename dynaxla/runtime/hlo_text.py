"""What is read off the texts of optimized modules. Imports no torch, as the compiling child process uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_COLLECTIVE = re.compile(
    r"= (.*?) (all-(?:reduce|gather|to-all)|reduce-scatter|collective-\w+)(?:-start)?"
    r"\(.*?(replica_groups=\S+|source_target_pairs=\S+)"
)


def list_collectives(hlo: str) -> list[tuple[str, ...]]:
    """The collectives of an optimized module in the order in which XLA runs them: type, kind and groups."""
    return _COLLECTIVE.findall(hlo)


_MOVE_OPCODES = frozenset("parameter constant bitcast reshape transpose broadcast".split())
_EXACT_OPCODES = frozenset("add subtract multiply divide negate abs".split())
_COMPUTATION = re.compile(r"^(?:ENTRY )?(\S+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"calls=([^\s,]+).*__ynn_fusion")
_INSTRUCTION = re.compile(r"\s*(ROOT )?(\S+) = (\w+)\[[^\]]*\]\S* ([\w-]+)\(([^)]*)\)(?:.*to_apply=([^\s,]+))?")


class _Instruction(NamedTuple):
    root: str
    name: str
    element: str
    opcode: str
    operands: str
    reducer: str


def has_exact_fusions(hlo: str) -> bool:
    """Whether the library computes XLA's numbers: it reduces nothing, or only sums values that it computes as XLA does.

    In jaxlib 0.10.2 the library drops NaN in maxima and minima, omits conversions to narrower types and back, and its
    `exp` overflows before the result does.

    Args:
        hlo: the text of an optimized module, as `HloPrintOptions.short_parsable` prints it.
    """
    computations: Mapping[str, str] = dict(_COMPUTATION.findall(hlo))
    return all(_keeps_fusion(computations[name], computations) for name in _CALLED.findall(hlo))


def _keeps_fusion(fusion: str, computations: Mapping[str, str]) -> bool:
    if " reduce(" not in fusion and " reduce-window(" not in fusion:
        return True
    instructions = list(_instructions(fusion))
    parameters = {each.name for each in instructions if each.opcode == "parameter"}
    return len(instructions) == len(fusion.splitlines()) and all(
        _is_same(each, parameters, computations) for each in instructions
    )


def _instructions(computation: str) -> Iterator[_Instruction]:
    for line in computation.splitlines():
        if found := _INSTRUCTION.match(line):
            yield _Instruction(*found.groups(default=""))


def _is_same(instruction: _Instruction, parameters: set[str], computations: Mapping[str, str]) -> bool:
    """Whether the library computes the instruction as XLA does."""
    if instruction.opcode == "convert":  # the library may omit a chain of conversions
        return bool(instruction.root) or instruction.operands in parameters
    if instruction.opcode == "reduce":
        return " add(" in computations[instruction.reducer]
    return instruction.opcode in _MOVE_OPCODES or (
        instruction.opcode in _EXACT_OPCODES and instruction.element in ("f32", "f64")
    )
