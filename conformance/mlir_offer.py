"""Lowers calls of one op by torch-mlir, runs them and compares with eager, in forked processes that may crash."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils import _pytree as pytree

from conformance.mlir_company import NARROW, lost_in_company
from conformance.mlir_run import Lowering, alone
from conformance.op_calls import Call
from dynaxla.lowering.lowering_choice import reason_for_jax
from dynaxla.ops.record import Finding
from dynaxla.ops.sampling import CHOOSE

FEW = 2
LIMIT_S = 20.0  # for a module, and one more for each of its calls
OF_JAX = frozenset({CHOOSE})
"""Ops whose eager kernels are JAX's too, which never ends in a forked process: they are offered in this one."""
DIED, HUNG = "the process died", "time limit"
REFUSED = "eager refuses this call when it is run again"  # which says nothing about torch-mlir
UNKNOWN = "failed to legalize operation 'torch.operator'"
BODY = "takes the JAX body: "
TOLERANCES = {  # relative, absolute
    torch.float64: (1e-7, 1e-7),
    torch.float32: (2e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.complex64: (2e-5, 1e-5),
}


@dataclass(frozen=True)
class Offer:
    """How calls are offered.

    Attributes:
        lowering: with the op's aten form, where it is not offered as it is; with its JAX body results are compared that
            eager does not settle.
        findings: what the op's record says; calls of which one speaks alone are left out.
    """

    lowering: Lowering
    findings: tuple[Finding, ...] = ()

    def sweep(self, calls: Sequence[Call]) -> list[str | None]:
        """What is wrong with torch-mlir's results of each call, or None; a call that kills costs only itself."""
        calls = list(calls)
        if not calls:
            return []
        if calls[0].target in OF_JAX:
            return self._check(calls)
        found = in_child(lambda: self._check(calls), LIMIT_S + len(calls))
        if isinstance(found, list):
            return found
        if len(calls) == 1:
            return [found]
        middle = len(calls) // 2
        return self.sweep(calls[:middle]) + self.sweep(calls[middle:])

    def _check(self, calls: list[Call]) -> list[str | None]:
        """In the child: all in one module or, if that is refused, half of them."""
        found: list[str | None] = [self._outside(call) for call in calls]
        offered = [call for call, reason in zip(calls, found, strict=True) if reason is None]
        told = iter(self._offered(offered))
        return [next(told) if reason is None else reason for reason in found]

    def _outside(self, call: Call) -> str | None:
        try:
            if not call.beyond_eager:
                call.run()
            graph, _ = alone([call])
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return REFUSED
        node = next(node for node in graph.nodes if node.target is call.target)
        bound = (one.reason for one in self.findings if one.calls is not None and one.calls(node))
        reason = reason_for_jax(node) or next(bound, None)
        return None if reason is None else BODY + reason

    def _offered(self, calls: list[Call]) -> list[str | None]:
        if not calls:
            return []
        found = self._refusals(calls)
        for look in (self._compared, self._in_company):
            told = iter(look([call for call, reason in zip(calls, found, strict=True) if reason is None]))
            found = [next(told) if reason is None else reason for reason in found]
        return found

    def _refusals(self, calls: list[Call]) -> list[str | None]:
        """What torch-mlir says against each call; it is asked before anything is compiled, which takes much longer."""
        first = self._refusal(calls[:1])
        if first is not None and UNKNOWN in first:
            return [first] * len(calls)
        if first is None and self._refusal(calls) is None:
            return [None] * len(calls)
        groups: dict[str, list[Call]] = defaultdict(list)
        for call in calls:
            groups[call.dtype].append(call)
        found = {id(call): told for some in groups.values() for call, told in zip(some, self._alike(some), strict=True)}
        return [found[id(call)] for call in calls]

    def _alike(self, calls: list[Call]) -> list[str | None]:
        """What torch-mlir says against calls in one dtype: where it refuses the first few, the others are not tried."""
        few, rest = calls[:FEW], calls[FEW:]
        told = [self._refusal([call]) for call in few]
        if None not in told:
            return told + told[-1:] * len(rest)
        return told + ([None] * len(rest) if self._refusal(rest) is None else [self._refusal([call]) for call in rest])

    def _refusal(self, calls: list[Call]) -> str | None:
        if not calls:
            return None
        try:
            self.lowering.lower(calls, by_body=False)
        except Exception as error:  # whatever it is, it is what is to be reported
            return _told(error)
        return None

    def _compared(self, calls: list[Call]) -> list[str | None]:
        if not calls:
            return []
        try:
            results = self.lowering.run(calls, by_body=False)
        except Exception as error:  # XLA refuses one
            if len(calls) > 1:
                middle = len(calls) // 2
                return self._compared(calls[:middle]) + self._compared(calls[middle:])
            return [_told(error)]
        return self._judged(calls, results)

    def _in_company(self, calls: list[Call]) -> list[str | None]:
        """What is wrong with calls of 16-bit floats that are right alone."""
        narrow = [call for call in calls if any(x.dtype in NARROW for x in call.tensors) and not call.beyond_eager]
        told = dict(zip(map(id, narrow), self._lost_in_company(narrow), strict=True))
        return [told.get(id(call)) for call in calls]

    def _lost_in_company(self, calls: list[Call]) -> list[str | None]:
        try:
            return lost_in_company(self.lowering, calls)
        except Exception as error:  # a body refuses a call, or XLA does
            if len(calls) == 1:
                return [_told(error)]
            middle = len(calls) // 2
            return self._lost_in_company(calls[:middle]) + self._lost_in_company(calls[middle:])

    def _judged(self, calls: list[Call], results: list[list[torch.Tensor]]) -> list[str | None]:
        wanted = [None if call.beyond_eager else _tensors(call.run()) for call in calls]
        found = [None if want is None else difference(want, got) for want, got in zip(wanted, results, strict=True)]
        told = [i for i, want in enumerate(wanted) if want is None or found[i] or any(x.dtype in NARROW for x in want)]
        for i, body in zip(told, self._bodies([calls[i] for i in told]), strict=True):
            want = wanted[i]
            if want is None:
                found[i] = REFUSED if body is None else difference(body, results[i])
            elif body is None:  # a call that the record refuses
                continue
            elif found[i] is None:
                found[i] = lost_roundings(want, results[i], body)
            elif difference(body, results[i]) is None:  # eager is at fault, or what it gives is another's
                found[i] = None
        return found

    def _bodies(self, calls: list[Call]) -> list[list[torch.Tensor] | None]:
        """What the JAX body gives of each call; None where it cannot be had."""
        try:
            return [*self.lowering.run(calls, by_body=True)]
        except Exception:  # a body refuses a call, or XLA does
            if len(calls) == 1:
                return [None]
            middle = len(calls) // 2
            return self._bodies(calls[:middle]) + self._bodies(calls[middle:])


def difference(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str | None:
    """What is wrong with `actual`, or None."""
    for want, got in zip(expected, actual, strict=True):
        if (want.dtype, want.shape) != (got.dtype, got.shape):
            return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        relative, absolute = TOLERANCES.get(want.dtype, (0.0, 0.0))
        close = torch.isclose(got, want.resolve_conj(), relative, absolute, equal_nan=True)
        if not close.all():
            index = tuple(int(i) for i in (~close).nonzero()[0])
            return f"{int((~close).sum())} of {close.numel()} values differ, {got[index]} not {want[index]}"
    return None


def lost_roundings(expected: list[torch.Tensor], actual: list[torch.Tensor], body: list[torch.Tensor]) -> str | None:
    """What says that `actual`, of 16 bits, is farther from eager than the JAX body's results, or None."""
    for want, got, ours in zip(expected, actual, body, strict=True):
        if want.dtype in NARROW and (far := _farthest(got, want)) > _farthest(ours, want):
            return f"{far:.1e} of the value off eager; the JAX body {_farthest(ours, want):.1e}"
    return None


def _farthest(got: torch.Tensor, want: torch.Tensor) -> float:
    finite = want.isfinite() & got.isfinite()
    wide, exact = got[finite].double(), want[finite].double()
    return float(((wide - exact).abs() / exact.abs().clamp(min=1e-6)).max()) if finite.any() else 0.0


def _told(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "error:" in line or "failed to legalize" in line] or lines
    return f"refused: {told[0].strip() if told else type(error).__name__}"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def in_child(work: Callable[[], Any], limit_s: float) -> Any:
    """The result of the work in a forked process, or how that ended."""
    here, there = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_send, args=(work, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit_s) else HUNG
    except EOFError:
        return DIED
    finally:
        process.kill()
        process.join()


def _send(work: Callable[[], Any], connection: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    connection.send(work())
    connection.close()
