"""The part of docs/ops.md that says what the op sweep found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from conformance.sweep_evidence import (
    SWEPT,
    claims,
    core_overloads,
    counts,
    eager_parts,
    share_correct,
)
from conformance.sweep_record import Record, Status

OPS_NAMED = 8  # of the ops that met the same eager part

_INTRODUCTION = """\
The sweep runs samples of every op in torch's own OpInfo database (`op_db`) through `torch.compile(backend="dynaxla")`,
in processes apart, and compares with eager by the table in `tests/tolerances.py`; where a result is further off, it must be
about as near to float64 as eager's own. Gradients are those of fixed random cotangents: where equal elements tie, an element
may get that of its equal; what cancels to nothing may leave a few roundings of its terms; and eager's hardsigmoid in float64,
whose gradient has 1 / 6 in float32, is listed as off (`conformance/opinfo_compare.py`). Random ops run twice: with
`options={"rng": "eager"}` their numbers are compared, and compiled, as "whole" and "verified" count them, their shape, dtype
and finiteness (their distributions are tested in `tests/decompositions/test_random.py`).
`conformance/results/ops_sweep.tsv` has a line for
each op, dtype and direction."""


def write_evidence(records: Sequence[Record]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "## What was verified"
    yield ""
    yield _INTRODUCTION
    yield ""
    yield from _by_dtype(records)
    claimed = claims(records).counts()
    yield (
        f"Of {sum(claimed.values())} claims below (an overload in a dtype that is swept) {claimed['verified']} are verified, "
        f"{claimed['not run']} were not met in the sweep, {claimed['failing']} fail."
    )
    yield ""
    yield from _core(claims(records).verified)
    yield from _not_correct(records)
    yield from _in_eager(records)


def _by_dtype(records: Sequence[Record]) -> Iterator[str]:
    yield '"whole" counts those of the correct ops of which no part ran in eager.'
    yield ""
    yield "| dtype | direction | ops | correct | share | whole | wrong | raised | died or too slow | eager takes no sample |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for direction in ("forward", "backward"):
        for dtype in SWEPT:
            found = counts(records, dtype, direction)
            if found:
                yield _count_line(dtype, direction, found)
    yield ""


def _count_line(dtype: str, direction: str, found: Counter[str]) -> str:
    lost = found["died"] + found["timed out"]
    total = sum(found[status.value] for status in Status)
    cells = [dtype, direction, total, found["correct"], f"{share_correct(found):.1%}", found["whole"]]
    cells += [found["wrong"], found["raised"], lost, found["not run"]]
    return "| " + " | ".join(map(str, cells)) + " |"


def _core(verified: Mapping[str, frozenset[str]]) -> Iterator[str]:
    core = core_overloads()
    eager = {op: way.removeprefix("eager: ") for op, way in core.items() if way.startswith("eager: ")}
    ways = Counter(way for op, way in core.items() if op not in eager)
    seen = sum(way == "compiled" and bool(verified[str(op)]) for op, way in core.items())
    yield (
        f"Of the {len(core)} overloads of torch's core ATen opset {len(core) - len(eager)} need no eager part: "
        f"{ways['compiled']} are compiled ({seen} of them verified), {ways['decomposed']} decomposed, "
        f"{ways['functional']} replaced by what they are without writing, {ways['size']} sizes that are known while "
        "compiling. The others:"
    )
    yield ""
    yield from (f"- `{op}`: {why}" for op, why in eager.items())
    yield ""


def _not_correct(records: Sequence[Record]) -> Iterator[str]:
    bad = [record for record in records if Status(record.status).is_bad]
    if not bad:
        return
    yield "Not correct:"
    yield ""
    yield "| op | direction | dtypes | status | what |"
    yield "|---|---|---|---|---|"
    grouped: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(bad):
        grouped.setdefault((record.op, record.direction, record.status), []).append(record)
    for (op, direction, status), same in grouped.items():
        detail = same[0].detail.split(" | ")[0].replace("|", "\\|")
        yield f"| {op} | {direction} | {', '.join(r.dtype for r in same)} | {status} | {detail} |"
    yield ""


def _in_eager(records: Sequence[Record]) -> Iterator[str]:
    yield "What ran in eager in float32, between executables or, at a graph break of Dynamo's, outside of them:"
    yield ""
    yield "| reason | overload | ops |"
    yield "|---|---|---|"
    for (op, why), ops in eager_parts(r for r in records if r.dtype == "float32").items():
        more = f" and {len(ops) - OPS_NAMED} more" if len(ops) > OPS_NAMED else ""
        yield f"| {why.replace('_', ' ')} | {op.replace('-', ' ')} | {', '.join(ops[:OPS_NAMED])}{more} |"
    yield ""
