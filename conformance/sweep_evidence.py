"""Compares the op sweep's results with what the op table claims to compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from conformance.sweep_record import Record, Status
from dynaxla.decompositions.decomposition_table import decomposition_table
from dynaxla.decompositions.random_draws import random_decompositions
from dynaxla.ops import record as ops
from dynaxla.ops.table import core_table

SWEPT = tuple("float32 bfloat16 float16 float64 int64 int32 bool complex64".split())
_FAILED = ("lowering_", "link_", "compile_", "mispredicted")  # beginnings of the reasons that no row foresees


@dataclass(frozen=True)
class Claims:
    """Dtypes of overloads, by name.

    Attributes:
        claimed: what the table says is compiled, of the dtypes that are swept.
        verified: of these what was part of an executable that gave eager's result.
        failing: what was part of one that did not, and of none that did.
    """

    claimed: Mapping[str, frozenset[str]]
    verified: Mapping[str, frozenset[str]]
    failing: Mapping[str, frozenset[str]]

    def counts(self) -> dict[str, int]:
        """Pairs of an overload and a dtype: verified, not run and failing."""
        claimed, verified, failing = (
            sum(map(len, part.values())) for part in (self.claimed, self.verified, self.failing)
        )
        return {"verified": verified, "not run": claimed - verified - failing, "failing": failing}


def claims(records: Iterable[Record]) -> Claims:
    """Compares the results with the op table."""
    claimed = {str(known.target): _claimed_dtypes(known) for known in core_table().records.values()}
    right, wrong = set(), set()
    for record in records:
        seen = {(op, record.dtype) for op in record.compiled}
        if record.status == Status.CORRECT.value:
            right |= seen
        elif Status(record.status).is_bad:
            wrong |= seen | {(op, record.dtype) for op, _ in _unforeseen(record)}
    verified = {op: frozenset(d for d in dtypes if (op, d) in right) for op, dtypes in claimed.items()}
    failing = {op: frozenset(d for d in dtypes - verified[op] if (op, d) in wrong) for op, dtypes in claimed.items()}
    return Claims(claimed, verified, failing)


def contradictions(records: Iterable[Record]) -> list[str]:
    """What the sweep found that the records of ops do not say."""
    found = []
    records = list(records)
    for op, dtypes in claims(records).failing.items():
        found += [f"{op} is claimed in {dtype} and was never right" for dtype in sorted(dtypes)]
    limits = {str(known.target): known.limits for known in core_table().records.values()}
    for record in records:
        found += [f"{record.op} in {record.dtype}: {op} runs in eager by {why}" for op, why in _unforeseen(record)]
        unsaid = [op for op, why in _eager_ops(record) if why == "unsupported_call" and not limits.get(op, "-")]
        found += [
            f"{record.op} in {record.dtype}: a call of {op} runs in eager; its record has no limits" for op in unsaid
        ]
    return found


def core_overloads() -> dict[OpOverload, str]:
    """torch's core ATen opset, and the way of each.

    "compiled" by the op table, "decomposed", "functional" (functionalization replaces what writes), "size" (arithmetic on
    sizes), or "eager: ..." with the reason.
    """
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            target = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.core in target.tags:
                found[target] = _way(target)
    return dict(sorted(found.items(), key=lambda item: str(item[0])))


def counts(records: Iterable[Record], dtype: str, direction: str) -> Counter[str]:
    """Lines of a dtype and direction by status, and "whole": those correct without an eager part."""
    found: Counter[str] = Counter()
    for record in records:
        if (record.dtype, record.direction) == (dtype, direction):
            found[record.status] += 1
            found["whole"] += record.status == Status.CORRECT.value and not record.eager
    return found


def share_correct(found: Mapping[str, int]) -> float:
    """Of what was run, the share that is correct; of `counts`."""
    run = sum(found.get(status.value, 0) for status in Status if status is not Status.NOT_RUN)
    return found.get(Status.CORRECT.value, 0) / run if run else 0.0


def eager_parts(records: Iterable[Record]) -> dict[tuple[str, str], list[str]]:
    """Overload and reason of everything that ran in eager, with the ops that met it, by reason."""
    found: dict[tuple[str, str], set[str]] = {}
    for record in records:
        for op, why in _eager_ops(record):
            found.setdefault((op, why), set()).add(record.op)
    return {key: sorted(ops) for key, ops in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))}


def _claimed_dtypes(known: ops.Record) -> frozenset[str]:
    return frozenset(d for d in SWEPT if known.dtypes is None or getattr(torch, d) in known.dtypes)


def _eager_ops(record: Record) -> Iterator[tuple[str, str]]:
    for token in record.eager:
        op, _, why = token.rpartition(":")
        yield op, why


def _unforeseen(record: Record) -> list[tuple[str, str]]:
    return [(op, why) for op, why in _eager_ops(record) if why.startswith(_FAILED)]


def _way(target: OpOverload) -> str:
    if target in core_table().records:
        return "compiled"
    if target._opname.startswith("sym_"):
        return "size"
    if target in decomposition_table() or target in random_decompositions():
        return "decomposed"
    if target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return "decomposed"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "eager: its random numbers are drawn by eager PyTorch"
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
        return "eager: the result's size, or what is done with it, depends on values"
    if torch.Tag.inplace_view in target.tags:
        return "eager: it changes the sizes of its input in place"
    return "functional" if target._schema.is_mutable else "eager: no lowering"
