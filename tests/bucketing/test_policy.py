"""What every bucket policy promises, and what each one's buckets are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaxla.bucket_policy import (
    DEFAULT,
    BucketPolicy,
    Default,
    Exact,
    Explicit,
    Geometric,
    Multiples,
    PowersOfTwo,
    sizes,
)
from dynaxla.errors import BucketError, OptionError
from dynaxla.targets.tpu import LANE_FRIENDLY

SIZES = st.integers(0, 5000) | st.integers(0, 2**40)
POWERS = st.integers(0, 9).map(lambda exponent: 2**exponent)
WASTES = st.floats(0.01, 10)
MULTIPLES = st.integers(1, 300)
POLICIES: st.SearchStrategy[BucketPolicy] = st.one_of(
    st.just(Exact()),
    st.builds(PowersOfTwo, POWERS),
    st.builds(Multiples, MULTIPLES),
    st.builds(Geometric, WASTES, MULTIPLES),
    st.builds(Explicit, st.sets(st.integers(1, 6000), min_size=1).map(lambda sizes: tuple(sorted(sizes)))),
    st.builds(Default, st.integers(0, 40), POWERS, POWERS),
)


def test_every_policy_is_held_to_the_promises() -> None:
    """And is in the table of docs/bucketing.md."""
    named = [getattr(sizes, name) for name in sizes.__all__]
    table = (Path(__file__).parents[2] / "docs" / "bucketing.md").read_text().partition("## Policies")[2]
    held = str(POLICIES)
    assert [kind.__name__ for kind in named if issubclass(kind, BucketPolicy) and kind.__name__ not in held] == []
    assert [kind.__name__ for kind in named if f"| `dynaxla.{kind.__name__}(" not in table] == []


@given(POLICIES, SIZES)
def test_a_bucket_holds_its_size_and_is_its_own_bucket(policy: BucketPolicy, size: int) -> None:
    bucket = policy.bucket(size)
    assert bucket >= size
    assert policy.bucket(bucket) == bucket
    assert type(bucket) is int


@given(POLICIES, SIZES, SIZES)
def test_a_larger_size_has_no_smaller_bucket(policy: BucketPolicy, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert policy.bucket(low) <= policy.bucket(high)


@given(POLICIES)
def test_sizes_0_and_1_are_their_own_buckets(policy: BucketPolicy) -> None:
    assert (policy.bucket(0), policy.bucket(1)) == (0, 1)
    assert policy.bucket(2) >= 2


@given(POLICIES, st.integers(0, 3000), st.integers(0, 400))
def test_buckets_lists_the_buckets_of_every_size(policy: BucketPolicy, low: int, count: int) -> None:
    expected = sorted({policy.bucket(size) for size in range(low, low + count)})
    assert policy.buckets(low, low + count - 1) == tuple(expected)


@given(WASTES, MULTIPLES)
def test_geometric_keeps_to_its_waste(waste: float, multiple_of: int) -> None:
    policy = Geometric(waste, multiple_of)
    smallest = 2
    for bucket in policy.buckets(2, 3000):
        rounded = -(-smallest // multiple_of) * multiple_of
        assert bucket % multiple_of == 0
        assert bucket <= max((1 + waste) * smallest, rounded)
        # It would be a waste of programs to stop short of what is allowed.
        assert bucket + multiple_of > (1 + waste) * smallest * (1 - 1e-12)
        smallest = bucket + 1


@given(st.integers(0, 40), POWERS, POWERS, st.integers(2, 10**6))
def test_default_keeps_to_its_waste(exact_up_to: int, steps: int, multiple_of: int, size: int) -> None:
    bucket = Default(exact_up_to, steps, multiple_of).bucket(size)
    assert bucket < 2 * size
    if size > steps * multiple_of:
        assert bucket < (1 + 1 / steps) * size


@given(st.integers(0, 40), POWERS, POWERS, st.integers(2, 2000))
def test_default_buckets_are_exact_or_multiples_or_smaller_powers_of_two(
    exact_up_to: int, steps: int, multiple_of: int, size: int
) -> None:
    bucket = Default(exact_up_to, steps, multiple_of).bucket(size)
    if size <= exact_up_to:
        assert bucket == size
    else:
        assert bucket % multiple_of == 0 or (bucket < multiple_of and bucket.bit_count() == 1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Exact(), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)),
        (PowersOfTwo(), (1, 2, 4, 8, 16)),
        (PowersOfTwo(min=8), (1, 8, 16)),
        (Multiples(5), (1, 5, 10, 15)),
        (Geometric(0.5), (1, 3, 6, 10, 16)),
        (Geometric(0.5, 4), (1, 4, 8, 12)),
        (Explicit((1, 3, 10)), (1, 3, 10, 11, 12)),
        (Default(), (1, 2, 3, 4, 8, 16)),
        (Default(exact_up_to=2, steps=4, multiple_of=1), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)),
    ],
    ids=str,
)
def test_buckets_up_to_12(policy: BucketPolicy, expected: tuple[int, ...]) -> None:
    assert policy.buckets(1, 12) == expected


def test_the_defaults() -> None:
    assert DEFAULT.buckets(1, 512) == (1, 2, 3, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    assert LANE_FRIENDLY.buckets(1, 800) == (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)


def test_no_sizes_have_no_buckets() -> None:
    assert DEFAULT.buckets(5, 4) == ()


def test_a_size_above_the_last_is_an_error_where_asked() -> None:
    policy = Explicit((64, 128), above="error")
    assert policy.bucket(128) == 128
    with pytest.raises(BucketError, match=r"129.*128"):
        policy.bucket(129)
    with pytest.raises(BucketError, match="129"):
        policy.buckets(100, 200)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (PowersOfTwo, {"min": 3}),
        (PowersOfTwo, {"min": 0}),
        (Multiples, {"of": 0}),
        (Multiples, {"of": 2.0}),
        (Multiples, {"of": True}),
        (Geometric, {"waste": 0}),
        (Geometric, {"waste": -1}),
        (Geometric, {"waste": float("nan")}),
        (Geometric, {"waste": float("inf")}),
        (Geometric, {"waste": "0.25"}),
        (Geometric, {"waste": True}),
        (Geometric, {"multiple_of": 0}),
        (Explicit, {"sizes": ()}),
        (Explicit, {"sizes": [1, 2]}),
        (Explicit, {"sizes": (2, 1)}),
        (Explicit, {"sizes": (2, 2)}),
        (Explicit, {"sizes": (0, 2)}),
        (Explicit, {"sizes": (2.0,)}),
        (Explicit, {"sizes": (2,), "above": "largest"}),
        (Default, {"exact_up_to": -1}),
        (Default, {"steps": 3}),
        (Default, {"multiple_of": 24}),
    ],
)
def test_a_bad_value_is_refused_with_a_hint(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(reversed(arguments))[:5] + "|size of Explicit") as caught:
        kind(**arguments)
    assert caught.value.hint


def test_policies_are_values() -> None:
    assert Geometric(0.5) == Geometric(0.5, 1)
    assert len({Default(), DEFAULT, LANE_FRIENDLY, Exact(), Exact()}) == 3
