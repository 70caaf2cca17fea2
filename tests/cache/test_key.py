"""No two different lists of parts have one key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaxla.bucket_policy.sizes import Multiples, PowersOfTwo
from dynaxla.cache.key import Key
from dynaxla.options import Options

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.text("ab\0", max_size=3)
    | st.binary(max_size=3)
    | st.floats(-1, 1)
)


def _nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(children, max_size=3)
    return few | few.map(tuple) | st.dictionaries(st.text("ab", max_size=2), children, max_size=3)


PARTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), st.recursive(ATOMS, _nested, max_leaves=6), max_size=4)


def _shape(value: Any) -> Any:
    """A value that is equal to another one's only if types and signs of zeros are: what the key must tell apart."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(_shape, value))
    if isinstance(value, dict):
        return "dict", frozenset((name, _shape(each)) for name, each in value.items())
    return type(value).__name__, value, isinstance(value, float) and math.copysign(1, value)


@given(PARTS, PARTS)
def test_different_parts_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (Key.of(**one) == Key.of(**other)) == (_shape(one) == _shape(other))


@given(PARTS)
def test_a_small_change_changes_the_key_and_its_part_alone(parts: dict[str, Any]) -> None:
    before = Key.of(**parts, x=0)
    for other in (1, "0", b"0", False, 0.0, None, (0,), [0], {"0": 0}, [[0]], ((), 0)):
        after = Key.of(**parts, x=other)
        assert after.digest != before.digest
        assert [name for (name, one), (_, two) in zip(before.parts, after.parts) if one != two] == ["x"]


def test_parts_do_not_run_into_each_other() -> None:
    texts = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc", ""),
        ("abc",),
        ("", "abc"),
        ("a", "b", "c"),
        (("a", "b"), "c"),
        ("a", ("b", "c")),
    ]
    keys = [Key.of(**{f"p{index}": text for index, text in enumerate(line)}) for line in texts]
    keys += [Key.of(p=line) for line in texts]
    assert len({key.digest for key in keys}) == len(keys)


def test_the_order_in_which_parts_are_given_does_not_count() -> None:
    assert Key.of(a=1, b={"x": 1, "y": 2}, c={3, 4, 5}) == Key.of(c={5, 4, 3}, b={"y": 2, "x": 1}, a=1)


def test_a_key_is_the_same_in_every_process() -> None:
    """It is written into file names that last: a change of the encoding is a change of the format."""
    parts = {"a": [1, "two", b"three", 4.0, None, True], "b": {"x": (), "y": {Path("/z"), "w"}}}
    assert Key.of(**parts).digest == "6f5fbb1f9a2cb4b777c5a0e1ef9b55b7b6b0758edadbd4d8695ee470f3f98dd9"


class Colour(Enum):
    RED = 1
    GREEN = 2


class Number(IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Point:
    x: int
    y: int


@dataclass(frozen=True)
class Place:
    x: int
    y: int


def test_classes_count() -> None:
    values = [Colour.RED, Colour.GREEN, Number.ONE, 1, Point(1, 2), Point(2, 1), Place(1, 2), (1, 2), {"x": 1, "y": 2}]
    assert len({Key.of(value=value).digest for value in values}) == len(values)


def test_options_are_parts() -> None:
    options = [Options(), Options(fold_parameters=False), Options(buckets=PowersOfTwo()), Options(buckets=Multiples(8))]
    assert len({Key.of(options=each).digest for each in options}) == len(options)
    assert Key.of(options=Options()) == Key.of(options=Options())


@pytest.mark.parametrize(
    "part", [object(), lambda: None, 1j, iter(()), Point], ids=["object", "function", "complex", "iterator", "class"]
)
def test_what_is_not_known_is_no_part(part: object) -> None:
    with pytest.raises(TypeError, match="cannot be part of a key"):
        Key.of(part=part)
    with pytest.raises(TypeError, match="cannot be part of a key"):
        Key.of(part=[{"deeper": (part,)}])
