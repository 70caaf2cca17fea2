"""Records of ATen overloads, and the families that collect them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import PadRule
from dynaxla.ops.aten_calls import Form
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict, read_findings
from dynaxla.torch_api.overloads import OpOverload

Body = Callable[..., Any]
"""A JAX function with the parameters of the ATen schema. Tensors are passed as JAX arrays, other arguments as the Python
values of the FX node (ints, floats, lists, `torch.dtype`, None); omitted arguments take the body's Python defaults, which
therefore equal the schema's. It returns an array, or a tuple of arrays for an op with several results, with exactly
torch's shapes and dtypes; a float may have a wider dtype, to be rounded to torch's, where that depends on the device. It is
traced with 64-bit types enabled."""

Check = Callable[[Node], str | None]
"""Returns the reason why a call (arguments and `meta["val"]`) cannot be compiled; None if it can."""

_Function = TypeVar("_Function", bound=Body)


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
        on_tpu: its JAX function in programs for a single TPU, which may call kernels that XLA cannot partition; None: `body`.
    """

    target: OpOverload
    body: Body
    pad: PadRule | None = None
    check: Check | None = None
    dtypes: frozenset[torch.dtype] | None = None
    limits: str = ""
    torch_mlir: tuple[Finding, ...] = ()
    as_aten: Form | None = None
    on_tpu: Body | None = None

    def body_on(self, platform: str, *, is_sharded: bool) -> Body:
        """Its JAX function in programs for a platform (JAX's name), of one device or of a mesh."""
        return self.on_tpu if self.on_tpu is not None and platform == "tpu" and not is_sharded else self.body

    @property
    def lowered(self) -> frozenset[torch.dtype]:
        """The operand dtypes in which torch-mlir lowers calls of the op, on some platform."""
        found = (finding for finding in self.torch_mlir if finding.verdict in (Verdict.RIGHT, Verdict.SLOWER))
        never = (finding for finding in self.torch_mlir if finding.excludes_all)
        dtypes: frozenset[torch.dtype] = frozenset().union(*(finding.dtypes for finding in found))
        return dtypes.difference(*(finding.dtypes for finding in never))

    def torch_mlir_takes(self, call: Node, dtypes: frozenset[torch.dtype], platform: str) -> bool:
        """Whether torch-mlir lowers a call with operands of these dtypes on a platform (JAX's name)."""
        bound = (
            finding for finding in self.torch_mlir if finding.dtypes & dtypes and finding.excludes_call(call, platform)
        )
        return self.lowered >= dtypes and next(bound, None) is None


class OpFamily:
    """The records of one module, in order; the decorator `op` adds a body's records.

    Args:
        dtypes: those of records that name none; None: all that programs compute with.
    """

    def __init__(self, dtypes: Iterable[torch.dtype] | None = None) -> None:
        self._records: list[Record] = []
        self._dtypes = dtypes

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
        on_tpu: Body | None = None,
    ) -> Callable[[_Function], _Function]:
        """Decorates the body of these overloads; the arguments are the attributes of `Record`.

        Args:
            torch_mlir: findings about some calls; those about all calls of an overload are in torch_mlir_verdicts.tsv.
        """
        named = self._dtypes if dtypes is None else dtypes
        covered = None if named is None else frozenset(named)

        def register(body: _Function) -> _Function:
            for target in targets:
                findings = (*read_findings().get(str(target), ()), *torch_mlir)
                self._records.append(Record(target, body, pad, check, covered, limits, findings, as_aten, on_tpu))
            return body

        return register
