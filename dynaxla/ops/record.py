"""What is known about one ATen overload, and the family that its record stands in."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import PadRule
from dynaxla.ops.aten_calls import Form
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
    WRONG = "wrong"
    ROUNDS = "loses roundings"
    SLOWER = "slower"
    CRASHES = "crashes"
    NO_LOWERING = "no lowering"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of offering an op to torch-mlir in some dtypes.

    Attributes:
        verdict: what came of it.
        dtypes: of the tensor operands or, without any, of the results.
        reason: the call, or the number, that shows it.
        platforms: those that it binds; None: every one.
        calls: of which calls it speaks; None: of all.
    """

    verdict: Verdict
    dtypes: frozenset[torch.dtype]
    reason: str = ""
    platforms: frozenset[str] | None = None
    calls: Callable[[Node], bool] | None = None

    def binds(self, call: Node, platform: str) -> bool:
        """Whether it keeps a call from torch-mlir, in its dtypes."""
        if self.verdict is Verdict.RIGHT or not (self.platforms is None or platform in self.platforms):
            return False
        return self.calls is None or self.calls(call)


def right(dtypes: Set[torch.dtype]) -> Finding:
    """Every call of the sweep in these dtypes gave eager's result."""
    return Finding(Verdict.RIGHT, frozenset(dtypes))


def wrong(dtypes: Set[torch.dtype], reason: str, calls: Callable[[Node], bool] | None = None) -> Finding:
    """A call of the sweep gave another result than eager; the reason says which."""
    return Finding(Verdict.WRONG, frozenset(dtypes), reason, calls=calls)


def rounds(dtypes: Set[torch.dtype], reason: str = "XLA may drop the roundings between its steps") -> Finding:
    """Results of 16 bits may be farther from eager's than the body's, which rounds where eager does."""
    return Finding(Verdict.ROUNDS, frozenset(dtypes), reason)


def slower(
    platforms: Set[str], dtypes: Set[torch.dtype], reason: str, calls: Callable[[Node], bool] | None = None
) -> Finding:
    """Right, but slower than the body on some platforms: JAX's names of them."""
    return Finding(Verdict.SLOWER, frozenset(dtypes), reason, frozenset(platforms), calls)


def crashes(dtypes: Set[torch.dtype], reason: str, calls: Callable[[Node], bool] | None = None) -> Finding:
    """torch-mlir's process dies, or never ends."""
    return Finding(Verdict.CRASHES, frozenset(dtypes), reason, calls=calls)


def no_lowering(dtypes: Set[torch.dtype], reason: str) -> Finding:
    """torch-mlir refuses calls, as an op and through torch's decomposition."""
    return Finding(Verdict.NO_LOWERING, frozenset(dtypes), reason)


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
        torch_mlir: what came of offering the op to torch-mlir. A call takes the body where nothing is found right, or
            where something else is found that binds it.
        as_aten: the form in which torch-mlir is offered the op; None: as it is.
    """

    target: OpOverload
    body: Body
    pad: PadRule | None = None
    check: Check | None = None
    dtypes: frozenset[torch.dtype] | None = None
    limits: str = ""
    torch_mlir: tuple[Finding, ...] = ()
    as_aten: Form | None = None

    @property
    def lowered(self) -> frozenset[torch.dtype]:
        """The operands' dtypes in which torch-mlir lowers calls of the op, on some platform."""
        found = (finding for finding in self.torch_mlir if finding.verdict in (Verdict.RIGHT, Verdict.SLOWER))
        return frozenset().union(*(finding.dtypes for finding in found))

    def torch_mlir_takes(self, call: Node, dtypes: frozenset[torch.dtype], platform: str) -> bool:
        """Whether torch-mlir lowers a call with operands of these dtypes, on a platform of JAX's name."""
        bound = (finding for finding in self.torch_mlir if finding.dtypes & dtypes and finding.binds(call, platform))
        return self.lowered >= dtypes and next(bound, None) is None


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
        as_aten: Form | None = None,
    ) -> Callable[[_Function], _Function]:
        """Makes a function the body of these overloads; the arguments are the attributes of `Record`."""
        covered = None if dtypes is None else frozenset(dtypes)

        def register(body: _Function) -> _Function:
            self._records += (
                Record(target, body, pad, check, covered, limits, torch_mlir, as_aten) for target in targets
            )
            return body

        return register
