"""Compares the speed of torch-mlir's function of an op with that of the JAX body: one call of medium size, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from conformance.mlir_offer import in_child
from conformance.mlir_record import Line
from conformance.mlir_run import Executable, Lowering
from conformance.op_calls import Call

ELEMENTS = (1 << 16, 1 << 22)  # in all tensors of a call of middling size
FACTORS = (256, 128, 64, 32, 16, 8, 4, 2)
ROUNDS = 15
LIMIT_S = 60.0
DIFFERS = "differs from the body's result of a large call"
SLOW = 1.15  # times as long as the body: from here on an op is slower

KINDS = {  # the dtype that is measured, and those of which it speaks, too
    "float32": ("float64", "complex64"),
    "bfloat16": ("float16",),
    "int64": ("int32", "int16", "int8", "uint8"),
    "bool": (),
}
EAGER_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


def timed(lowering: Lowering, lines: Sequence[Line], calls: Sequence[Call]) -> list[Line]:
    """The lines of one overload, where those that are right say how much slower they are than the body, if they are.

    One dtype of a kind is measured; what is slower is measured twice.
    """
    told = {line.dtype: line for line in lines}
    for measured, kind in KINDS.items():
        rightly = [dtype for dtype in (measured, *kind) if dtype in told and told[dtype].verdict in ("right", "slower")]
        call = middling([call for call in calls if rightly and call.dtype == rightly[0]])
        if call is None:
            continue
        word, reason = _word(lowering, call)
        for dtype in rightly:
            told[dtype] = replace(
                told[dtype], verdict=word, reason=f"{reason} | {call.exact_key()}"[:150] if reason else ""
            )
    return [told[line.dtype] for line in lines]


def _word(lowering: Lowering, call: Call) -> tuple[str, str]:
    """A verdict on a call that is right when it is small, and its reason."""
    first = ratio(lowering, call)
    if isinstance(first, str):
        return ("wrong", first) if first.startswith(DIFFERS) else ("right", "")
    second = ratio(lowering, call) if first > SLOW else first
    slow = min(first, second) if isinstance(second, float) else first
    return ("slower", f"{slow:.2g} times as long as the body") if slow > SLOW else ("right", "")


def middling(calls: Sequence[Call]) -> Call | None:
    """One of the calls, grown: the same ranks and arguments, every size that eager allows multiplied by one factor."""
    grown = (call for factor in FACTORS for one in calls for call in _grown(one, factor))
    return next((call for call in grown if _is_middling(call) and _runs(call)), None)


def _grown(call: Call, factor: int) -> Iterator[Call]:
    """By every size; by the sizes of the first dim alone; by all but the last."""
    if any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in call.leaves):
        return
    for grows in (lambda dims: range(dims), lambda dims: range(1), lambda dims: range(dims - 1)):
        leaves = [_tiled(leaf, factor, grows) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
        if sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) <= ELEMENTS[1]:
            yield replace(call, leaves=tuple(leaves))


def _tiled(x: torch.Tensor, factor: int, grows: Callable[[int], range]) -> torch.Tensor:
    if not x.dim():
        return x
    times = [factor if dim in grows(x.dim()) and x.shape[dim] > 1 else 1 for dim in range(x.dim())]
    sizes = [n * time for n, time in zip(x.shape, times, strict=True)]
    if torch.Size(sizes).numel() > ELEMENTS[1]:
        return x.expand(2, *x.shape)[0]  # too large in any case
    return x.repeat(times)


def _is_middling(call: Call) -> bool:
    return ELEMENTS[0] <= sum(x.numel() for x in call.tensors) <= ELEMENTS[1]


def _runs(call: Call) -> bool:
    try:
        call.run()
    except EAGER_ERRORS:
        return False
    return True


def ratio(lowering: Lowering, call: Call) -> float | str:
    """Time of torch-mlir's function by that of the body's, or why there is none."""
    found: Any = in_child(lambda: _ratio(lowering, call), LIMIT_S)
    return found  # type: ignore[no-any-return]


def _ratio(lowering: Lowering, call: Call) -> float | str:
    try:
        both = [_executable(lowering, call, by_body=by_body) for by_body in (False, True)]
    except Exception as error:  # torch-mlir, the body or XLA refuses a grown call
        return f"refused: {str(error)[:80]}"
    if told := _difference(*(executable.run(_with_nan(call)) for executable in both)):
        return told
    buffers = both[0].buffers(call.tensors)
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for executable, times in zip(both, took, strict=True):
            begin = time.perf_counter()
            executable.start(buffers)
            times.append(time.perf_counter() - begin)
    ours, bodys = (statistics.median(sorted(times)[: ROUNDS // 2]) for times in took)
    return round(ours / bodys, 2)


def _with_nan(call: Call) -> list[torch.Tensor]:
    """The operands, with a NaN in the first float tensor."""
    tensors = [x.contiguous().clone() for x in call.tensors]
    floats = [x for x in tensors if x.is_floating_point()]
    for x in floats[:1]:
        x.view(-1)[x.numel() // 2] = float("nan")
    return tensors


def _difference(ours: list[torch.Tensor], bodys: list[torch.Tensor]) -> str | None:
    """What says that results of many elements differ by more than the order of their sums, or None."""
    for our, body in zip(ours, bodys, strict=True):
        our, body = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (our, body))
        size = body[body.isfinite()].abs().max().item() if body.isfinite().any() else 1.0
        close = torch.isclose(our, body, 1e-3, 1e-3 * max(size, 1e-30), equal_nan=True)
        if not close.all():
            return f"{DIFFERS}: {int((~close).sum())} of {close.numel()} values"
    return None


def _executable(lowering: Lowering, call: Call, *, by_body: bool) -> Executable:
    linked, _ = lowering.lower([call], by_body=by_body)
    return Executable(linked.module)
