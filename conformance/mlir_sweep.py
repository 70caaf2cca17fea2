"""Finds for each overload and dtype whether torch-mlir lowers it right, by PyTorch's own samples.

    python -m conformance.mlir_sweep                     # every op, which takes half an hour on one core
    python -m conformance.mlir_sweep --only aten.addmm   # some; prints their lines of torch_mlir_verdicts.tsv
    python -m conformance.mlir_sweep --only aten.addmm --opinfo addmm   # by the samples of these OpInfos alone: a minute
    python -m conformance.mlir_sweep --decompositions float32,int64   # the decompositions that were not tried yet

An op is lowered as other ATen calls if `ops.aten_forms` has a form for it, else as it is. In the dtypes in which
torch-mlir then does not lower it right, it is lowered through torch's decomposition too (in every dtype, if its record
says so). Calls that always take the JAX body (`lowering.lowering_choice.unseen`) are left out. The verdicts are written
to results/mlir_sweep.tsv, a line for each overload, dtype and way; a test fails if a record contradicts them.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch._ops import OpOverload

from conformance.mlir_findings import TAKEN, findings, way_of
from conformance.mlir_offer import BODY, DIED, HUNG, REFUSED, Offer
from conformance.mlir_record import DECOMPOSED, DIRECT, FORM, Line, in_way, read, write
from conformance.mlir_run import Lowering, prepare
from conformance.mlir_speed import timed
from conformance.op_calls import Call, collect, has_news
from conformance.varied_calls import varied
from dynaxla.ops.aten_calls import Form, decompose
from dynaxla.ops.table import core_table
from dynaxla.torch_api.decompositions import has_decomposition

REASON_LENGTH = 150

Lines = dict[str, list[Line]]
Calls = Mapping[OpOverload, Sequence[Call]]


def ways(target: OpOverload) -> Iterator[tuple[str, dict[OpOverload, Form]]]:
    """How an op is offered: in the order in which ways are preferred."""
    form = core_table().forms.get(target)
    if form not in (None, decompose):
        yield FORM, {target: form}
        return
    yield DIRECT, {}
    if has_decomposition(target):
        yield DECOMPOSED, {target: decompose}


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
    """The lines of one overload: of each dtype in the first way, and in the second where that is what can be taken."""
    lines: list[Line] = []
    left = list(calls)
    for way, forms in ways(target):
        lines += in_one_way(target, way, forms, left)
        if core_table().forms.get(target) is not decompose:
            wrong = {line.dtype for line in lines if line.verdict != "right"}
            left = [call for call in left if call.dtype in wrong]
    return lines


def in_one_way(target: OpOverload, way: str, forms: dict[OpOverload, Form], calls: Sequence[Call]) -> Iterator[Line]:
    """The lines of one overload that is offered in one way."""
    offer = Offer(Lowering(core_table().bodies, forms), core_table().records[target].torch_mlir)
    return lines_of(target, way, calls, offer.sweep(calls))


def sweep(lines: Lines, calls: Calls, wanted: Sequence[OpOverload]) -> Iterator[OpOverload]:
    """Offers ops in every way; gives those of which lines are new."""
    for target in wanted:
        lines[str(target)] = offered(target, calls.get(target, []))
        yield target


def sweep_decompositions(
    lines: Lines, calls: Calls, wanted: Sequence[OpOverload], dtypes: Sequence[str]
) -> Iterator[OpOverload]:
    """Offers torch's decompositions of ops in those of these dtypes in which they are right in no way so far."""
    for dtype in dtypes:
        for target in wanted:
            told = [line for line in lines.get(str(target), []) if line.dtype == dtype]
            some = [call for call in calls.get(target, []) if call.dtype == dtype]
            if {line.way for line in told} == {DIRECT} and told[0].verdict not in TAKEN and has_decomposition(target):
                lines[str(target)] += in_one_way(target, DECOMPOSED, {target: decompose}, some)
                yield target


def time_all(lines: Lines, calls: Calls, wanted: Sequence[OpOverload], way: str) -> Iterator[OpOverload]:
    """Times what is right, in one way or in those that the records take, beside the bodies."""
    for target in wanted:
        told = lines.get(str(target), [])
        for one, forms in ways(target):
            if one == (way or way_of(core_table().records[target])):
                here = timed(Lowering(core_table().bodies, forms), in_way(told, one), calls.get(target, []))
                lines[str(target)] = [*(line for line in told if line.way != one), *here]
                yield target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sweep the overloads whose name matches")
    parser.add_argument("--opinfo", default="", help="run the samples of the OpInfos whose name matches, not of all")
    parser.add_argument("--new", action="store_true", help="leave out the overloads that the record has")
    parser.add_argument("--decompositions", default="", help="offer torch's decompositions alone, in these dtypes")
    parser.add_argument(
        "--speed", nargs="?", const="", metavar="WAY", help="time what is right beside the body instead, in one way"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    lines = read()
    wanted = {
        t for t in core_table().records if re.search(options.only, str(t)) and not (options.new and str(t) in lines)
    }
    print(f"calls of {len(wanted)} overloads are collected from the samples of OpInfo", flush=True)
    only = (lambda name: re.search(options.opinfo, name) is not None) if options.opinfo else has_news
    calls = varied(collect(wanted, only).calls())
    print(f"{len(wanted)} overloads, {sum(map(len, calls.values()))} calls", flush=True)
    some = sorted(wanted, key=str)
    if options.speed is not None:
        done = time_all(lines, calls, some, options.speed)
    elif options.decompositions:
        done = sweep_decompositions(lines, calls, some, options.decompositions.split(","))
    else:
        done = sweep(lines, calls, some)
    for target in done:
        write(lines)
        told = " ".join(f"{line.dtype}={line.verdict}/{line.way}" for line in lines[str(target)])
        print(f"{target}: {told or 'no call'}", *findings(lines[str(target)]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
