"""The fusions that XLA's CPU compiler delegates to a library (YNN), read from the optimized HLO."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

WITHOUT_REDUCTIONS = (
    "xla_cpu_experimental_ynn_fusion_type",
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
)
"""XLA's option of fusions for the library, and its default value without reductions."""

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
