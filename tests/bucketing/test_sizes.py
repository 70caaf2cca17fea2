"""True sizes: what is known of how they grow, and which of them a bucket is too small for."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatPow,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    Max,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
)

from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.bucketing.padded_value import Factor, Unpaddable
from dynaxla.bucketing.size_buckets import PartBucket
from dynaxla.bucketing.size_expressions import Size, compile_sizes, evaluate, is_monotone, simplify, upper_bound

S, T = sympy.symbols("s t", integer=True, positive=True)


@pytest.mark.parametrize(
    ("size", "simple"),
    [
        (S + Mod(8 - Mod(S, 8), 8), 8 * FloorDiv(S + 7, 8)),
        (S + PythonMod(-S, 8), 8 * FloorDiv(S + 7, 8)),
        (PythonMod(S, 4) - 1, PythonMod(S, 4) - 1),
        (Mod(S, 4) - 1, Mod(S, 4) - 1),
        (S - Mod(S, 8), 8 * FloorDiv(S, 8)),
        (FloorDiv(S + Mod(8 - Mod(S, 8), 8), 8), FloorDiv(S + 7, 8)),
        (FloorDiv(S**2 + S * T, S), S + T),
        (FloorDiv(S**2, 2 * T), FloorDiv(S**2, 2 * T)),
        (CeilToInt(FloatTrueDiv(ToFloat(S) - 0.5, 1.0)), S),
        (
            T * FloorToInt(ToFloat(FloorDiv(S, 2)) + 1.5) - T * FloorDiv(S, 2),
            T * (FloorDiv(S, 2) + 1) - T * FloorDiv(S, 2),
        ),
        (CeilToInt(1.5 * ToFloat(S)), CeilToInt(1.5 * ToFloat(S))),
        (TruncToInt(FloatPow(ToFloat(FloorDiv(S, 2) ** 2), 0.5)), FloorDiv(S, 2)),
        (TruncToInt(FloatPow(ToFloat(S * T), 0.5)), TruncToInt(FloatPow(ToFloat(S * T), 0.5))),
        (T + Mod(8 - Mod(S, 8), 8), T + Mod(8 - Mod(S, 8), 8)),
        (FloorDiv(S, T), FloorDiv(S, T)),
    ],
)
def test_a_simpler_size_is_the_same(size: Size, simple: Size) -> None:
    found = simplify(size)
    assert found == simple
    for s in range(1, 40):
        values = {S: s, T: 5}
        assert evaluate(found, values) == evaluate(size, values)


@pytest.mark.parametrize(
    ("size", "grows"),
    [
        (2 * S + T, True),
        (FloorDiv(S + 7, 8) * T, True),
        (64 - Max(0, 64 - S), True),
        (TruncToInt(1.5 * ToFloat(S)), True),
        (128 - S, False),
        (Mod(S, 8), False),
        (S - T, False),
        (FloorDiv(S, T), False),
        (-FloorDiv(10 - S, 2) + T, True),
        (Max(0, 64 - S), False),
    ],
)
def test_which_sizes_grow_with_their_symbols(size: Size, grows: bool) -> None:
    assert is_monotone(size) is grows
    of = compile_sizes([size], (S, T))
    found = [of(s, t)[0] for s in range(1, 30) for t in range(1, 3)]
    assert found == [evaluate(size, {S: s, T: t}) for s in range(1, 30) for t in range(1, 3)]
    if grows:
        assert all(low <= high for low, high in zip(found, found[2:], strict=False))


def test_a_bucket_that_is_too_small_is_told_from_a_size_that_cannot_be_padded() -> None:
    build = PaddedGraphBuilder(PartBucket({S: 8, T: 32}, {}), torch.device("cpu"))
    with pytest.raises(Unpaddable) as small:
        build.factor(FloorDiv(S, 8))
    assert small.value.of_bucket
    with pytest.raises(Unpaddable) as unbounded:
        PaddedGraphBuilder(PartBucket({S: 5000, T: 5000}, {}), torch.device("cpu")).factor(FloorDiv(S, T - 2))
    assert not unbounded.value.of_bucket
    assert build.factor(FloorDiv(S, T - 2)) == Factor(8, FloorDiv(S, T - 2))  # no call divides by zero
    assert build.factor(128 - S) == Factor(126, 128 - S)
    assert build.factor(FloorDiv(T, 8)) == Factor(4, FloorDiv(T, 8))


@pytest.mark.parametrize(
    "size",
    [128 - S, Mod(S, 8), S - FloorDiv(S + 1, 2), S - T, FloorDiv(S, T), S * (60 - S), Max(0, 64 - S), (S - 9) ** 2],
)
@pytest.mark.parametrize("buckets", [{S: 48, T: 12}, {S: 5000, T: 3000}])
def test_the_largest_of_a_bucket(size: Size, buckets: dict[sympy.Symbol, int]) -> None:
    bound = upper_bound(size, buckets)
    assert bound is not None
    of = compile_sizes([size], (S, T))
    seconds = (2, 3, buckets[T] // 2, buckets[T]) if buckets[T] > 100 else range(2, buckets[T] + 1)
    found = max(of(s, t)[0] for s in range(2, buckets[S] + 1) for t in seconds)
    assert bound >= found
    if buckets[S] == 48:  # few enough to be exact
        assert bound == found


def test_a_bound_far_above_most_sizes_is_unpaddable_at_its_bucket() -> None:
    with pytest.raises(Unpaddable, match="may be 2048, many times what it mostly is") as wide:
        PaddedGraphBuilder(PartBucket({S: 4096, T: 64}, {}), torch.device("cpu")).factor(FloorDiv(S, T))
    assert wide.value.of_bucket
    assert PaddedGraphBuilder(PartBucket({S: 512, T: 4}, {}), torch.device("cpu")).factor(FloorDiv(S, T)).padded == 256
