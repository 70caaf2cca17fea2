"""Small values that XLA's CPU compiler would compute again for each element of a larger one.

XLA fuses a table (a rotary embedding's cosines, the encoding of positions) with the op that spreads it over a batch, and
computes the table's functions for every element of the batch. A function that XLA does not inline computes them once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dynaxla.lowering.call_graph import CallGraph, Handle, OpCall, Value
from dynaxla.lowering.stablehlo_functions import StablehloFunction

_FUNCTIONS = re.compile(
    r"\b(?:stablehlo|chlo)\.(?:atan2|cbrt|cosine|erf\w*|exponential\w*|log|log_plus_one|logistic|power|sine|tan|tanh)\b"
)
_STEP = re.compile(r"= (?:stablehlo|chlo)\.(?!constant|broadcast_in_dim|reshape).*xf(?:32|64)>")
_STEPS_OF_A_FUNCTION = 16  # a sine of `ops/vector_functions.py` is some sixty
_FEEDS_NONE = re.compile(
    r"stablehlo\.(?:reduce|convolution|custom_call|dot|dot_general|fft|reduce_window|scatter|sort)\b"
)
"""Ops that XLA's CPU compiler fuses with none of those that read their results."""
_READS_NONE = re.compile(r"stablehlo\.(?:convolution|custom_call|dot|dot_general|fft|sort|while)\b")
"""Ops that it fuses with none of those that make their operands."""

_OPERAND = re.compile(r"%arg(\d+)\b")
_SPREAD = 4
_FEWEST_SAVED = 1 << 15


@dataclass(frozen=True, slots=True)
class _Cost:
    """How many functions such as a sine a call computes for each element, which operands it reads, and whether XLA may fuse
    it with others."""

    functions: int
    read: frozenset[int]
    feeds_none: bool
    reads_none: bool


def find_spread(graph: CallGraph, functions: Mapping[str, StablehloFunction]) -> frozenset[Handle]:
    """The calls whose results are to be computed once, by functions that XLA does not inline.

    Functions such as sines are computed for such a result, by its call or by those of its operands with which XLA fuses it;
    and a call that reads it has so many more elements that computing these again for each would take longer than a call
    does, some microseconds: from 32,768 functions on.

    Args:
        functions: those of the graph's calls, by key.
    """
    if len(graph.calls) < 2:  # an op of the device, as a rule
        return frozenset()
    costs = {key: _cost(functions[key].text) for key in graph.distinct}
    largest: dict[Value, int] = {}
    for call, operands in graph.calls.values():
        if not costs[call.key].reads_none:
            largest |= {operand: max(largest.get(operand, 0), _size(call)) for operand in operands}
    found: set[Handle] = set()
    carried: dict[Value, int] = {}
    for handle, (call, operands) in graph.calls.items():
        cost = costs[call.key]
        if cost.feeds_none or len(call.tensors) != 1:
            continue
        repeated = cost.functions + sum(carried.get(operands[i], 0) for i in cost.read)
        own, spread = math.prod(call.tensors[0].shape), largest.get((handle, 0), 0)
        if spread >= _SPREAD * own and (spread - own) * repeated >= _FEWEST_SAVED:
            found.add(handle)
        else:
            carried[handle, 0] = repeated
    return frozenset(found)


def _cost(text: str) -> _Cost:
    steps = len(_STEP.findall(text)) // _STEPS_OF_A_FUNCTION
    body = text.partition("\n}")[0].partition("\n")[2]  # of the first function; others follow
    read = frozenset(map(int, _OPERAND.findall(body)))
    functions = max(len(_FUNCTIONS.findall(text)), steps)
    return _Cost(functions, read, bool(_FEEDS_NONE.search(text)), bool(_READS_NONE.search(text)))


def _size(call: OpCall) -> int:
    """The number of elements of its largest tensor."""
    return max((math.prod(spec.shape) for spec in (*call.operands, *call.tensors)), default=0)
