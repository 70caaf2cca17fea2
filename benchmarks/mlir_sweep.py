"""What comes of offering every op to torch-mlir: the verdict for each overload and dtype, from PyTorch's own samples.

    python -m benchmarks.mlir_sweep                     # every op, which takes half an hour on one core
    python -m benchmarks.mlir_sweep --only aten.addmm   # some; prints what to write into their records

Every op is offered as its aten form where it has one (`ops.aten_forms`), or else as it is and, in the dtypes in which
torch-mlir then does not lower it right, through torch's decomposition. Calls that take the JAX body whatever is found of
their op (`lowering.choice.unseen`) are left out. What is found goes into results/mlir_sweep.tsv, a line for each overload
and dtype; a test fails where a record says something else.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from benchmarks.mlir_decomposed import decomposed
from benchmarks.mlir_findings import findings
from benchmarks.mlir_offer import BODY, DIED, HUNG, REFUSED, Offer
from benchmarks.mlir_record import Line, read, write
from benchmarks.mlir_run import Lowering, prepare
from benchmarks.mlir_speed import timed
from benchmarks.op_calls import Call, collect
from benchmarks.varied_calls import varied
from dynaxla.ops.aten_calls import Form
from dynaxla.ops.table import core_table

REASON_LENGTH = 150
DIRECT, FORM, DECOMPOSITION = "direct", "form", "decomposition"


def ways(target: OpOverload) -> Iterator[tuple[str, dict[OpOverload, Form]]]:
    """How an op is offered: in the order in which ways are preferred."""
    if target in core_table().forms:
        yield FORM, {target: core_table().forms[target]}
        return
    yield DIRECT, {}
    if target in torch._decomp.decomposition_table:
        yield DECOMPOSITION, {target: decomposed(target)}


def verdict(reasons: Sequence[str]) -> str:
    """One word for what is wrong with some calls."""
    if any(reason in (DIED, HUNG) for reason in reasons):
        return "crashes"
    if all(reason.startswith("refused") for reason in reasons):
        return "none"
    if all("off eager" in reason for reason in reasons):
        return "rounds"
    return "wrong" if any("differ" in reason or ", not " in reason for reason in reasons) else "none"


def lines_of(target: OpOverload, way: str, calls: Sequence[Call], found: Sequence[str | None]) -> Iterator[Line]:
    """The lines of one overload that was offered in one way."""
    by_dtype: dict[str, list[tuple[Call, str | None]]] = defaultdict(list)
    outside = {
        call.dtype: reason for call, reason in zip(calls, found, strict=True) if reason and reason.startswith(BODY)
    }
    for call, reason in zip(calls, found, strict=True):
        if reason is None or not reason.startswith((REFUSED, BODY)):
            by_dtype[call.dtype].append((call, reason))
    for dtype in sorted(outside.keys() - by_dtype.keys()):
        yield Line(str(target), dtype, way, "none", 0, 0, outside[dtype])
    alone = {d: [r for c, r in told if len(c.dtypes) == 1] for d, told in by_dtype.items()}
    wrong = {dtype for dtype, reasons in alone.items() if any(reasons)}
    for dtype, told in sorted(by_dtype.items()):
        # A call of several dtypes is no news of one that is right by itself when another is wrong by itself.
        by_itself = bool(alone[dtype]) and dtype not in wrong
        news = [(c, r) for c, r in told if r and not (by_itself and (c.dtypes - {dtype}) & wrong)]
        right = sum(reason is None for _, reason in told)
        if news:
            word = verdict([r for _, r in news])
            shown, told_of = next(((c, r) for c, r in news if verdict([r]) == word), news[0])
            reason = f"{told_of} | {shown.exact_key()}"
        else:
            word, reason = "right", ""
        reason = re.sub(r"\s+", " ", reason)[:REASON_LENGTH]
        yield Line(str(target), dtype, way, word, len(told), right, reason)


def offered(target: OpOverload, calls: Sequence[Call]) -> list[Line]:
    """The lines of one overload: of each dtype that of the first way in which it is right, or else of the first way."""
    best: dict[str, Line] = {}
    left = list(calls)
    for way, forms in ways(target):
        offer = Offer(Lowering(core_table().bodies, forms), core_table().records[target].torch_mlir)
        for line in lines_of(target, way, left, offer.sweep(left)):
            if line.dtype not in best or line.verdict == "right":
                best[line.dtype] = line
        wrong = {dtype for dtype, line in best.items() if line.verdict != "right"}
        left = [call for call in left if call.dtype in wrong]
        if not left:
            break
    return [best[dtype] for dtype in sorted(best)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sweep the overloads whose name matches")
    parser.add_argument("--new", action="store_true", help="leave out the overloads that the record has")
    parser.add_argument(
        "--speed", action="store_true", help="time what the record says is right beside the body instead"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    lines = read()
    wanted = {
        t for t in core_table().records if re.search(options.only, str(t)) and not (options.new and str(t) in lines)
    }
    calls = varied(collect(wanted).calls())
    print(f"{len(wanted)} overloads, {sum(map(len, calls.values()))} calls", flush=True)
    for target in sorted(wanted, key=str):
        some = calls.get(target, [])
        if options.speed:
            lowering = Lowering(core_table().bodies, core_table().forms)
            lines[str(target)] = timed(lowering, lines.get(str(target), []), some)
        else:
            lines[str(target)] = offered(target, some)
        write(lines)
        told = " ".join(f"{line.dtype}={line.verdict}/{line.way}" for line in lines[str(target)])
        print(f"{target}: {told or 'no call'}\n    torch_mlir={findings(lines[str(target)])}", flush=True)


if __name__ == "__main__":
    main()
