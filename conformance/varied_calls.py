"""Makes variations of calls: values at the limits of dtypes, ties, indices out of range, and slices without an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from conformance.op_calls import Call

VARIED_DTYPES = {"float32": 3, "bfloat16": 1}  # and how many calls of each
INDEXED_DTYPES = (*VARIED_DTYPES, "int64", "bool")
INDEXED_CALLS = 2  # of each dtype
VARIED_OPERANDS = 3
IMAGINARY_CALLS = 2
WHOLE_DTYPES = {"int64": 2, "int32": 2, "int16": 1, "int8": 1, "uint8": 1}
BEYOND = 10**6  # an index that is out of every sample's range
INDICES = ("index", "indices", "target")
NO_END = 2**63 - 1  # what `x[1:]` says

Variation = Callable[[Tensor], Tensor]


def varied(calls: Mapping[OpOverload, Sequence[Call]]) -> dict[OpOverload, list[Call]]:
    """The calls, and variations of some of them behind."""
    return {target: [*some, *_variations(some)] for target, some in calls.items()}


def _variations(calls: Sequence[Call]) -> Iterator[Call]:
    for dtype, count in VARIED_DTYPES.items():
        floats = [call for call in calls if call.dtype == dtype and any(map(_is_varied, call.leaves))]
        for call in _spread(floats, count):
            yield from _of_values(call)
    of_pairs = [call for call in calls if any(map(_is_complex, call.leaves))]
    for call in _spread(of_pairs, IMAGINARY_CALLS):
        yield _changed(call, [place for place, leaf in enumerate(call.leaves) if _is_complex(leaf)], _imaginary)
    for dtype, count in WHOLE_DTYPES.items():
        whole = [call for call in calls if call.dtype == dtype and _first_whole(call) is not None]
        for call in _spread(whole, count):
            yield _changed(call, [place for place in [_first_whole(call)] if place is not None], _at_the_ends)
    for dtype in INDEXED_DTYPES:
        indexed = [call for call in calls if call.dtype == dtype and _indices(call)]
        for call in _spread(indexed, INDEXED_CALLS):
            yield from _of_indices(call)
        yield from _spread(
            [call for each in calls if each.dtype == dtype for call in _without_end(each)], INDEXED_CALLS
        )


def _spread(calls: Sequence[Call], count: int) -> list[Call]:
    step = max(1, len(calls) // count)
    return list(calls[::step][:count])


def _is_varied(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 1


def _is_complex(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_complex() and leaf.numel() > 1


def _first_whole(call: Call) -> int | None:
    """The first operand, if it has whole numbers that are no indices. Others may be divisors, of which eager dies."""
    place = next((place for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)), None)
    first = None if place is None else call.leaves[place]
    if first is None or first.numel() < 2 or str(first.dtype).removeprefix("torch.") not in WHOLE_DTYPES:
        return None
    return None if any(first is index for index in _indices(call)) else place


def _at_the_ends(x: Tensor) -> Tensor:
    """Values that a float would round: what a lowering computes in floats is wrong of them."""
    ends = torch.iinfo(x.dtype)
    values = torch.tensor([ends.max, ends.max - 1, ends.min + 1, ends.max // 2 + 1, ends.max // 512 + 2], dtype=x.dtype)
    changed = x.contiguous().clone()
    count = min(len(values), changed.numel())
    changed.view(-1)[:count] = values[:count]
    return changed


def _of_values(call: Call) -> Iterator[Call]:
    places = [place for place, leaf in enumerate(call.leaves) if _is_varied(leaf)]
    for place in places[:VARIED_OPERANDS]:
        yield _changed(call, [place], lambda x: _with(x, math.nan))
    yield _changed(call, places[:1], lambda x: _with(x, math.inf))
    yield _changed(call, places[:1], lambda x: _with(x, -math.inf))
    yield _changed(call, places, lambda x: x * 100)
    yield _changed(call, places, lambda x: x.round().clamp(-1, 1))


def _imaginary(x: Tensor) -> Tensor:
    """Numbers without a real part, and a zero in front: what a lowering computes of real parts alone is wrong of them."""
    changed = torch.complex(torch.zeros_like(x.real), x.imag).to(x.dtype).contiguous()
    changed.view(-1)[:1] = 0
    return changed


def _changed(call: Call, places: Sequence[int], variation: Variation) -> Call:
    leaves = [variation(leaf) if place in places else leaf for place, leaf in enumerate(call.leaves)]
    return replace(call, leaves=tuple(leaves))


def _with(x: Tensor, value: float) -> Tensor:
    changed = x.contiguous().clone()
    changed.view(-1)[1] = value
    return changed


def _indices(call: Call) -> list[Tensor]:
    """The operands of a call that are places in another: whole numbers under the name of indices."""
    named = _named(call)
    values = pytree.tree_leaves([named.get(name) for name in INDICES])
    return [x for x in values if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.numel() > 1]


def _named(call: Call) -> dict[str, Any]:
    """The arguments of a call that are given, by name."""
    args, kwargs = pytree.tree_unflatten(list(call.leaves), call.treespec)
    given = zip(call.target._schema.arguments, args, strict=False)
    return {argument.name: value for argument, value in given} | kwargs


def _without_end(call: Call) -> Iterator[Call]:
    """The call as Python's slices without an end say it, if it goes on to the end of its dim."""
    named, wanted = _named(call), [argument.name for argument in call.target._schema.arguments]
    if not {"dim", "end"} <= set(wanted):
        return
    sizes = named.get("input_sizes") or next(x for x in named.values() if isinstance(x, Tensor)).shape
    if not sizes or named.get("end") not in (None, sizes[named.get("dim", 0)]):
        return
    named["end"] = NO_END
    defaults = {argument.name: argument.default_value for argument in call.target._schema.arguments}
    leaves, treespec = pytree.tree_flatten((tuple({**defaults, **named}.values()), {}))
    yield replace(call, leaves=tuple(leaves), treespec=treespec)


def _of_indices(call: Call) -> Iterator[Call]:
    """All the same, and such as eager refuses, or with which it reads and writes where it must not."""
    places = [place for place, leaf in enumerate(call.leaves) if any(leaf is index for index in _indices(call))]
    yield _changed(call, places, torch.zeros_like)
    for value in (BEYOND, -BEYOND):
        yield replace(_changed(call, places, partial(_first, value=value)), beyond_eager=True)


def _first(index: Tensor, value: int) -> Tensor:
    changed = index.contiguous().clone()
    changed.view(-1)[0] = value
    return changed
