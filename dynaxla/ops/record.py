"""What is known about one ATen overload, and the family that its record stands in."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Node

from dynaxla.bucketing.arguments import PadRule
from dynaxla.torch_api.overloads import OpOverload

Body = Callable[..., Any]
"""Mirrors the ATen schema in JAX. Tensors arrive as JAX arrays, everything else as the plain Python value in the FX node
(ints, floats, lists, `torch.dtype`, None); arguments the node leaves out take the body's own Python defaults, which
therefore equal the schema's. It returns an array, or a tuple of arrays for an op with several results, with exactly the
shapes and dtypes that torch gives. It is traced with 64-bit types on."""

Check = Callable[[Node], str | None]
"""Looks at one call (arguments and `meta["val"]`); says why this call cannot be compiled, or None."""

_Function = TypeVar("_Function", bound=Body)


class Verdict(enum.Enum):
    """What came of offering an op to torch-mlir."""

    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of offering an op to torch-mlir in some dtypes.

    Attributes:
        verdict: what came of it.
        dtypes: of the tensor operands or, without any, of the results.
        reason: the call, or the number, that shows it.
    """

    verdict: Verdict
    dtypes: frozenset[torch.dtype]
    reason: str = ""


def right(dtypes: frozenset[torch.dtype]) -> Finding:
    """Every call of the sweep in these dtypes gave eager's result."""
    return Finding(Verdict.RIGHT, dtypes)


@dataclass(frozen=True, slots=True)
class Record:
    """One overload (never an overload packet), beside its body.

    Attributes:
        target: the overload this record speaks of.
        body: what computes it where torch-mlir does not.
        pad: what it does to padding; None where that is not known, but for an op that torch calls pointwise.
        check: refuses calls that the record does not cover.
        dtypes: tensor dtypes (of inputs and outputs) it covers; None means every dtype XLA has.
        limits: one line for docs/ops.md about what it does not cover; the hint of the fallback reason.
        torch_mlir: what came of offering the op to torch-mlir. A call takes the body where nothing is found right.
    """

    target: OpOverload
    body: Body
    pad: PadRule | None = None
    check: Check | None = None
    dtypes: frozenset[torch.dtype] | None = None
    limits: str = ""
    torch_mlir: tuple[Finding, ...] = ()

    @property
    def lowered(self) -> frozenset[torch.dtype]:
        """The operands' dtypes in which torch-mlir lowers the op."""
        found = [finding.dtypes for finding in self.torch_mlir if finding.verdict is Verdict.RIGHT]
        return frozenset().union(*found)


class Family:
    """The records of one file, in the order of its bodies: each is written above its body, by `op`."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(self._records)

    def op(
        self,
        *targets: OpOverload,
        pad: PadRule | None = None,
        check: Check | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
        limits: str = "",
        torch_mlir: tuple[Finding, ...] = (),
    ) -> Callable[[_Function], _Function]:
        """Makes a function the body of these overloads; the arguments are the attributes of `Record`."""
        covered = None if dtypes is None else frozenset(dtypes)

        def register(body: _Function) -> _Function:
            self._records += (Record(target, body, pad, check, covered, limits, torch_mlir) for target in targets)
            return body

        return register
