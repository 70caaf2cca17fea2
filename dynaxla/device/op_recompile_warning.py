"""Ops outside of compiled graphs whose sizes vary: each set of sizes is a program, of which a user should know."""

from __future__ import annotations

from typing import Any

from dynaxla.device.op_call import LIST, PLAIN, TENSOR, OpInvocation, Part
from dynaxla.diagnostics import ManyPrograms
from dynaxla.isolation.forking import new_lock

EXPECTED = 32
"""A network's layers give one op so many sets of sizes, or fewer, as a rule."""


class OpRecompileWarnings:
    """Counts the programs of calls that differ in sizes and plain numbers alone; says once of each op that it has many.

    Safe from several threads.
    """

    def __init__(self) -> None:
        self._programs: dict[Any, int] = {}
        self._said: set[str] = set()
        self._lock = new_lock()

    def note(self, call: OpInvocation, made_by: str, refusal: str | None = None) -> ManyPrograms | None:
        """A program was made; what there is to say of it.

        Args:
            made_by: the op and the user's line.
            refusal: why calls like this cannot be padded to buckets, where they cannot.
        """
        kind = call.known.op, _kinds(call.parts), tuple([(name, _kind(part)) for name, part in call.named])
        name = call.known.name
        with self._lock:
            count = self._programs[kind] = self._programs.get(kind, 0) + 1
            if count <= EXPECTED or name in self._said:
                return None
            self._said.add(name)
        hint = "Inside of torch.compile sizes that vary are padded to a few buckets"
        reason = "one for each set of sizes, as it is called outside of compiled graphs"
        reason = reason if refusal is None else f"{reason} and cannot be padded ({refusal})"
        return ManyPrograms(count, reason, f"sizes of {made_by}", hint, what=name)


def _kinds(parts: tuple[Part, ...]) -> tuple[Any, ...]:
    return tuple([_kind(part) for part in parts])


def _kind(part: Part) -> Any:
    """A part without sizes and plain numbers; of a list of numbers, such as sizes are, that it is one."""
    if part is None:
        return None
    if part[0] == TENSOR:
        tensor = part[2].layout.tensor
        return TENSOR, tensor.dtype, len(tensor.shape)
    if part[0] == LIST:
        kinds = _kinds(part[1])
        return (LIST, *(kinds if any(kind and kind[0] == TENSOR for kind in kinds) else ()))
    return part[:2] if part[0] == PLAIN and part[1] in (int, float) else part
