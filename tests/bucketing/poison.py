"""Cases for pad rules: a small function, its inputs at a size, and the check that junk in the padding reaches no result.

Padding is filled with NaN, the largest integer or True before every run, so that a forgotten mask shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

import dynaxla
from dynaxla.bucket_policy import DEFAULT
from dynaxla.bucketing import padded_graph
from dynaxla.bucketing.argument_roles import PadRule
from dynaxla.bucketing.pad_rule import PadRules, rule_of
from dynaxla.diagnostics import ReasonId
from dynaxla.observe.recorder import Metrics
from dynaxla.programs import argument_binder, staged_arguments
from dynaxla.runtime.host_padding import PaddedShape
from tests.same_layout import assert_same_layout
from tests.tolerances import assert_close

SIZES = (5, 2, 7, 9, 12, 16, 17, 31)
Make = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A function over tensors whose sizes vary.

    Attributes:
        rule: the name of a pad rule that the function is to use; None where some part is to be compiled per exact shape.
        makes: for each argument: from the size to the tensor. Dims of 2, 3 and 4 elements are never padded, as these sizes
            are their own buckets.
    """

    name: str
    rule: str | None
    function: Callable[..., Any]
    makes: tuple[Make, ...]
    sizes: tuple[int, ...] = SIZES

    def __str__(self) -> str:
        return self.name


def case(rule: str | None, name: str, function: Callable[..., Any], *makes: Make, sizes: Any = SIZES) -> Case:
    return Case(name, rule, function, makes, tuple(sizes))


def poisoned(tensor: torch.Tensor, padded: PaddedShape) -> torch.Tensor:
    """The tensor in the corner of one full of junk."""
    if tensor.shape == padded.sizes:
        return tensor
    made = torch.full(padded.sizes, junk(tensor.dtype), dtype=tensor.dtype)
    made[tuple(slice(size) for size in tensor.shape)] = tensor
    return made


def junk(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


class UsedRules:
    """Which pad rules graphs were padded by."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def rule_of(self, target: OpOverload, rules: PadRules) -> PadRule:
        rule = rule_of(target, rules)
        self.used.add(rule.name)
        return rule


def pad_small_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has small arguments be padded as large ones are, where they would be copied into memory that lasts."""
    monkeypatch.setattr(staged_arguments, "MOST_BYTES", 0)


@contextmanager
def poison_padding() -> Iterator[None]:
    """Padding is junk in programs that are made meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        pad_small_arguments(patch)
        patch.setattr(argument_binder, "pad", poisoned)
        yield


def poison(monkeypatch: pytest.MonkeyPatch) -> UsedRules:
    rules = UsedRules()
    pad_small_arguments(monkeypatch)
    monkeypatch.setattr(argument_binder, "pad", poisoned)
    monkeypatch.setattr(padded_graph, "rule_of", rules.rule_of)
    return rules


def check(tested: Case) -> None:
    """Runs a case at every size and compares with eager: values, shapes, dtypes, strides, changed arguments, and what shares
    memory."""
    compiled = torch.compile(tested.function, backend="dynaxla", dynamic=True, options={"buckets": DEFAULT})
    before = dynaxla.read_metrics()
    for size in tested.sizes:
        torch.manual_seed(size)
        args = [make(size) for make in tested.makes]
        expected_args = [arg.clone() for arg in args]
        with torch.no_grad():
            expected = tested.function(*expected_args)
            actual = compiled(*args)
        compare([*tree_leaves(actual), *args], [*tree_leaves(expected), *expected_args], f"at {size}")
        tensors = [[x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in (actual, expected)]
        assert_same_layout(*tensors, args, expected_args)
    after = dynaxla.read_metrics()
    exact = after.exact_shapes[len(before.exact_shapes) :]
    if tested.rule is None:
        assert exact, "it was expected to be compiled per exact shape"
        return
    assert not exact, f"compiled per exact shape: {exact}"
    assert after.eager_ops == before.eager_ops, after.fallbacks[len(before.fallbacks) :]
    compiles = after.compiles - before.compiles
    assert compiles == len(buckets(tested)), f"{compiles} compiles for the buckets {buckets(tested)}"


def faults(before: Metrics, after: Metrics) -> list[str]:
    """What nobody meant: a pad rule that raised where it should have known what to do, an exception at a border."""
    lines = [*after.exact_shapes[len(before.exact_shapes) :], *after.fallbacks[len(before.fallbacks) :]]
    return [line for line in lines if is_fault(line)]


def is_fault(line: str) -> bool:
    """Whether this reason for an exact shape or for eager is a fault of the package."""
    return "its pad rule failed" in line or ReasonId.INTERNAL_ERROR.value in line


def buckets(tested: Case) -> set[tuple[int, ...]]:
    """The buckets that the sizes take."""
    return {tuple(DEFAULT.bucket(dim) for make in tested.makes for dim in make(size).shape) for size in tested.sizes}


def compare(actual: Sequence[Any], expected: Sequence[Any], where: str) -> None:
    assert len(actual) == len(expected)
    for mine, eager in zip(actual, expected, strict=True):
        if not isinstance(eager, torch.Tensor):
            assert mine == eager, f"{where}: {mine}, expected {eager}"
            continue
        try:
            assert_close(mine, eager)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
