"""Turns results of the torch-mlir sweep into lines of dynaxla/ops/torch_mlir_verdicts.tsv."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from conformance.mlir_record import DECOMPOSED, DIRECT, FORM, Line, in_way
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.record import Record
from dynaxla.ops.torch_mlir_verdicts import Verdict

LIKE = {  # dtypes with few calls, and the dtype with more of them that has to be right too
    "float64": "float32",
    "float16": "bfloat16",
    "complex64": "float32",
    "int32": "int64",
    "int16": "int64",
    "int8": "int64",
    "uint8": "int64",
}
TAKEN = ("right", "slower")
ENOUGH = 2  # calls of a dtype that is like no other


HALVES = ("float16", "bfloat16")
MOVES = (  # what computes nothing, or picks one of its operands, has no roundings to lose
    "_to_copy _unsafe_view alias all amax amin aminmax any argmax argmin argsort bucketize cat clamp clamp_max clamp_min clone "
    "constant_pad_nd copy count_nonzero detach diagonal expand fill flip full full_like gather index_select lift lift_fresh "
    "logical_and logical_not logical_or logical_xor masked_fill maximum minimum narrow ne neg new_full new_ones new_zeros "
    "nonzero ones ones_like permute reflection_pad1d reflection_pad2d reflection_pad3d relu repeat reshape _reshape_alias "
    "roll scalar_tensor scatter select select_scatter slice slice_scatter sort split split_with_sizes squeeze stack t topk "
    "transpose tril triu unbind unfold unsafe_split unsafe_split_with_sizes unsqueeze view where zeros zeros_like eq ge gt le "
    "lt isnan isinf prims.convert_element_type isneginf isposinf signbit dynaxla.kernel_channels_last"
).split()


@dataclass(frozen=True)
class Judged:
    """What the samples cannot show of some overloads, by the beginnings of their names."""

    names: tuple[str, ...]
    finding: str
    reason: str
    dtypes: str = ""

    def speaks_of(self, line: Line) -> bool:
        return line.overload.startswith(self.names) and bool(re.fullmatch(self.dtypes or ".*", line.dtype))


ROUNDS = "XLA may drop the roundings between its steps"
JUDGED = (
    Judged(("aten.hann_window.",), "wrong", "0.24999962, not 0.25: another formula than torch's"),
    Judged(("aten.native_group_norm",), "slower", "1.3 times as slow as the body"),
    Judged(("aten.convolution.",), "slower", "channels last are 1.3 to 2.8 times as fast"),
    Judged(
        ("aten.index_add.", "aten.index_copy.", "aten.index_fill.", "aten.max_pool2d_with_indices_backward."),
        "wrong",
        "an index of -1 counts from the end",
    ),
    Judged(("aten._upsample_nearest_exact",), "wrong", "takes another element than torch from 2 to 55"),
    Judged(("aten.logspace.",), "none", "too few calls to tell"),
    Judged(
        ("aten.xlogy.Scalar_Self", "aten.special_xlog1py.self_scalar"), "wrong", "0.0 not nan: [True, (([]), float64)]"
    ),
    Judged(("aten.cumprod.",), "none", "takes memory with the square of the size"),
    Judged(("aten.nll_loss",), "wrong", "a class out of range does not count as ignored"),
    Judged(("aten._trilinear",), "wrong", "its fake tensors refuse calls that eager takes"),
    Judged(
        ("aten.logical_and.", "aten.logical_or.", "aten.logical_xor."),
        "wrong",
        "of complex numbers of one shape the real parts alone count",
        "complex64",
    ),
    Judged(("aten.arange.",), "wrong", "start + n * step is rounded otherwise than torch's", ".*float.*"),
)


def judged(lines: Sequence[Line]) -> list[Line]:
    """The lines of one overload, where they do not speak for themselves with what is known beside them."""
    found = {(line.way, line.dtype): line for line in lines}
    return [_judged(line, found) for line in lines]


def _judged(line: Line, found: dict[tuple[str, str], Line]) -> Line:
    if line.verdict not in TAKEN:
        return line
    for one in JUDGED:
        if one.speaks_of(line):
            return replace(line, verdict=one.finding, reason=one.reason)
    if line.dtype in HALVES and not _moves(line.overload):
        return replace(line, verdict="rounds", reason="")
    like = found.get((line.way, LIKE.get(line.dtype, "")))
    if (like is None and line.right < ENOUGH) or (
        like is not None and (like.verdict not in TAKEN or like.right < ENOUGH)
    ):
        return replace(line, verdict="none", reason="too few calls to tell")
    return line


def _moves(overload: str) -> bool:
    name = overload.removeprefix("aten.")
    return any(name == move or name.startswith((move + ".", move + "_copy.")) for move in MOVES)


def findings(lines: Sequence[Line]) -> list[str]:
    """The lines of dynaxla/ops/torch_mlir_verdicts.tsv on an overload, for the way in which torch-mlir takes it.

    Nothing is said of dtypes without a lowering.
    """
    dtypes: dict[tuple[str, str], set[str]] = defaultdict(set)
    reasons: dict[str, str] = {}
    for line in judged(in_way(lines, taken_way(lines))):
        if line.verdict != "none":
            reason = ROUNDS if line.verdict == "rounds" else reasons.setdefault(line.verdict, short(line))
            dtypes[line.verdict, reason].add(line.dtype)
            if line.dtype == "complex64":
                dtypes[line.verdict, reason].add("complex128")
    order = ("right", "wrong", "rounds", "slower", "crashes")
    by_verdict = sorted(dtypes.items(), key=lambda item: order.index(item[0][0]))
    return [_row(lines[0].overload, *key, names) for key, names in by_verdict]


def _row(overload: str, verdict: str, reason: str, dtypes: set[str]) -> str:
    platforms = "cpu" if verdict == "slower" else ""
    return "\t".join((overload, Verdict[verdict.upper()].value, " ".join(sorted(dtypes)), platforms, reason))


def taken_way(lines: Sequence[Line]) -> str:
    """The way in which an op is taken: through torch's decomposition if that is right in float32, where the op itself is, and
    elsewhere. A form is not worth its while for whole numbers alone.
    """
    if in_way(lines, FORM):
        return FORM
    right = {
        way: {line.dtype for line in in_way(judged(lines), way) if line.verdict in TAKEN}
        for way in (DIRECT, DECOMPOSED)
    }
    return DECOMPOSED if right[DECOMPOSED] > right[DIRECT] and "float32" in right[DECOMPOSED] else DIRECT


def way_of(record: Record) -> str:
    """The way in which a record has its op offered."""
    return DIRECT if record.as_aten is None else DECOMPOSED if record.as_aten is decompose else FORM


def short(line: Line) -> str:
    """The reason of a line without what repeats the overload."""
    text = line.reason.replace("torch.", "").replace("Size(", "(")
    found = re.match(r"\d+ of \d+ values differ, (.*?) \| (.*)", text)
    return (f"{found[1]}: {found[2]}" if found else text)[:70]


def disagreement(record: Record, lines: Sequence[Line]) -> list[str]:
    """Where a record says something else than the sweep found; a finding of some calls alone is judged by hand."""
    said = {dtype for finding in record.torch_mlir for dtype in finding.dtypes}
    by_hand = {dtype for finding in record.torch_mlir if finding.calls is not None for dtype in finding.dtypes}
    told = []
    if (way := taken_way(lines)) != way_of(record):
        told.append(f"{record.target} is to be offered in the way {way}, not {way_of(record)}")
    for line in in_way(judged(lines), way_of(record)):
        dtype = getattr(torch, line.dtype)
        if line.verdict in TAKEN and dtype not in said:
            told.append(
                f"{line.overload} is right in {line.dtype}: the record does not say what keeps it from torch-mlir"
            )
        if line.verdict not in TAKEN and dtype in record.lowered - by_hand:
            told.append(f"{line.overload} is not right in {line.dtype}: {line.verdict}: {line.reason}")
    return told
