"""Records of ATen overloads, and the families that collect them."""

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
"""A JAX function with the parameters of the ATen schema. Tensors are passed as JAX arrays, other arguments as the Python
values of the FX node (ints, floats, lists, `torch.dtype`, None); omitted arguments take the body's Python defaults, which
therefore equal the schema's. It returns an array, or a tuple of arrays for an op with several results, with exactly
torch's shapes and dtypes. It is traced with 64-bit types enabled."""

Check = Callable[[Node], str | None]
"""Returns the reason why a call (arguments and `meta["val"]`) cannot be compiled; None if it can."""

_Function = TypeVar("_Function", bound=Body)


class Verdict(enum.Enum):
    """The result of testing torch-mlir's lowering of an op against eager PyTorch."""

    RIGHT = "right"
    WRONG = "wrong"
    ROUNDS = "loses roundings"
    SLOWER = "slower"
    CRASHES = "crashes"
    NO_LOWERING = "no lowering"


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on torch-mlir's lowering of an op in some dtypes.

    Attributes:
        verdict: the test's result.
        dtypes: dtypes of the tensor operands or, without any, of the results.
        reason: the call or the number that shows it.
        platforms: the platforms that it holds for; None: all.
        calls: whether it holds for a call; None: for all calls.
    """

    verdict: Verdict
    dtypes: frozenset[torch.dtype]
    reason: str = ""
    platforms: frozenset[str] | None = None
    calls: Callable[[Node], bool] | None = None

    def excludes_call(self, call: Node, platform: str) -> bool:
        """Whether it excludes a call in its dtypes from torch-mlir."""
        if self.verdict is Verdict.RIGHT or not (self.platforms is None or platform in self.platforms):
            return False
        return self.calls is None or self.calls(call)


def right(dtypes: Set[torch.dtype]) -> Finding:
    """In these dtypes every call of the sweep gave eager PyTorch's result."""
    return Finding(Verdict.RIGHT, frozenset(dtypes))


def wrong(dtypes: Set[torch.dtype], reason: str, calls: Callable[[Node], bool] | None = None) -> Finding:
    """In these dtypes a call of the sweep, given as the reason, gave another result than eager PyTorch."""
    return Finding(Verdict.WRONG, frozenset(dtypes), reason, calls=calls)


def rounds(dtypes: Set[torch.dtype], reason: str = "XLA may drop the roundings between its steps") -> Finding:
    """16-bit results may be farther from eager's than the body's, which rounds at the same steps as eager."""
    return Finding(Verdict.ROUNDS, frozenset(dtypes), reason)


def slower(
    platforms: Set[str], dtypes: Set[torch.dtype], reason: str, calls: Callable[[Node], bool] | None = None
) -> Finding:
    """Right, but slower than the body on these platforms (JAX's names)."""
    return Finding(Verdict.SLOWER, frozenset(dtypes), reason, frozenset(platforms), calls)


def crashes(dtypes: Set[torch.dtype], reason: str, calls: Callable[[Node], bool] | None = None) -> Finding:
    """torch-mlir's process crashes or does not end."""
    return Finding(Verdict.CRASHES, frozenset(dtypes), reason, calls=calls)


def no_lowering(dtypes: Set[torch.dtype], reason: str) -> Finding:
    """torch-mlir refuses calls, both as the op and as torch's decomposition."""
    return Finding(Verdict.NO_LOWERING, frozenset(dtypes), reason)


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one overload (never an overload packet).

    Attributes:
        target: the overload.
        body: its JAX function, for calls that torch-mlir does not lower.
        pad: its pad rule; None if there is none. Ops that torch tags as pointwise need none.
        check: returns why a call cannot be compiled; None: every call can.
        dtypes: supported dtypes of input and output tensors; None means every dtype that XLA has.
        limits: one line for docs/ops.md about unsupported calls; also the hint of the fallback reason.
        torch_mlir: findings about torch-mlir's lowering. A call takes the body if no finding is `right` in its dtypes, or
            another finding excludes it.
        as_aten: the aten form that torch-mlir lowers instead of the op; None: the op itself.
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
        """The operand dtypes in which torch-mlir lowers calls of the op, on some platform."""
        found = (finding for finding in self.torch_mlir if finding.verdict in (Verdict.RIGHT, Verdict.SLOWER))
        return frozenset().union(*(finding.dtypes for finding in found))

    def torch_mlir_takes(self, call: Node, dtypes: frozenset[torch.dtype], platform: str) -> bool:
        """Whether torch-mlir lowers a call with operands of these dtypes on a platform (JAX's name)."""
        bound = (
            finding for finding in self.torch_mlir if finding.dtypes & dtypes and finding.excludes_call(call, platform)
        )
        return self.lowered >= dtypes and next(bound, None) is None


class OpFamily:
    """The records of one module, in order; the decorator `op` adds a body's records."""

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
        """Decorates the body of these overloads; the arguments are the attributes of `Record`."""
        covered = None if dtypes is None else frozenset(dtypes)

        def register(body: _Function) -> _Function:
            self._records += (
                Record(target, body, pad, check, covered, limits, torch_mlir, as_aten) for target in targets
            )
            return body

        return register
