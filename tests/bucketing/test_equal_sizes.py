"""Symbols that were one size in every call have one bucket, until a call gives them two sizes; no result is ever wrong."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

import dynaxla
from dynaxla.bucket_policy import DEFAULT, PowersOfTwo
from dynaxla.bucketing.joint_policy import JOINT
from dynaxla.bucketing.shape_keys import EXACT, ShapeKey, ShapeKeys
from dynaxla.bucketing.size_buckets import BucketScheme, SizeSource, SymbolPolicies
from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import compare, poison

S, T, B = sympy.symbols("s t b", integer=True, positive=True)
SHAPES = ((B, 3, S, 8), (B, 3, T, 8))


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def _sizing(**settings: Any) -> BucketScheme:
    sources = tuple(SizeSource(place, None) for place in range(3))
    return BucketScheme.initial(
        (B, S, T), sources, (None, None, 70), SymbolPolicies(DEFAULT, JOINT, shapes=SHAPES, **settings)
    )


def test_symbols_that_fill_the_same_dims_begin_as_one_size() -> None:
    scheme = _sizing()
    assert scheme.classes == (0, 1, 1)
    assert scheme.fits((4, 9, 9))
    assert not scheme.fits((9, 9, 4))
    assert scheme.bucket((4, 9, 9)) == (4, 64)
    assert scheme.bucket((4, 69, 69)) == (4, 70)  # the graph holds for no more of the one, so of neither
    at = scheme.make_bucket((4, 64))
    assert S in at.padded
    assert T not in at.padded
    assert at.same == {T: S}


def test_a_program_holds_for_sizes_that_fit_alone() -> None:
    scheme = _sizing()
    assert scheme.holds((4, 64), (4, 9, 9))
    assert not scheme.holds((4, 64), (4, 9, 8))
    assert scheme.refine((4, 9, 8)).holds((4, 64, 64), (4, 9, 8))


def test_sizes_that_the_user_speaks_of_are_their_own() -> None:
    assert _sizing(given={S: PowersOfTwo()}).classes == (0, 1, 2)
    assert _sizing(apart=True).classes == (0, 1, 2)


def test_a_refined_plan_stays_so_and_programs_stay_in_use() -> None:
    ready: list[ShapeKey] = []
    keys = ShapeKeys((), _sizing(), lambda: ready)
    first = keys.of((4, 9, 9))
    ready.append(first)
    assert first == (4, 64)
    assert keys.of((4, 65, 9)) == (4, 96, 16)
    assert keys.of((4, 9, 9)) == first
    assert keys.of((4, 65, 65)) == (4, 96, 70)  # that program was never made
    assert keys.larger((4, 10, 10)) == [(4 * 64 * 64, first)]
    assert keys.larger((4, 10, 9)) == []
    keys.exclude_scheme((4, 96, 16))
    assert keys.of((4, 65, 9)) == (EXACT, 4, 65, 9)
    assert keys.of((4, 65, 65)) == (4, 70)


def _two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.softmax(0), (x * 2).mean(0), y.flip(0), y.sum(0)


def _check(compiled: Any, first: int, second: int) -> None:
    x, y = torch.randn(first, 3), torch.randn(second, 3)
    compare(compiled(x, y), _two(x, y), f"at {first}, {second}")


def test_sizes_part_at_the_first_call_that_parts_them(recorder: Recorder) -> None:
    compiled = torch.compile(_two, backend="dynaxla")
    _check(compiled, 5, 5)
    with recorder.expect(compiles=2):
        for size in (6, 7, 8, 12, 16):
            _check(compiled, size, size)
    with recorder.expect(
        compiles=3
    ):  # both to 16, and one of them to 8; what was compiled for equal sizes is in use again
        for sizes in ((12, 9), (16, 10), (6, 13), (11, 12), (7, 8), (8, 8), (16, 16)):
            _check(compiled, *sizes)


def test_a_frozen_program_of_equal_sizes_takes_no_others(recorder: Recorder) -> None:
    compiled = torch.compile(_two, backend="dynaxla")
    for size in (5, 12):
        _check(compiled, size, size)
    dynaxla.freeze(compiled, "next_bucket")
    with recorder.expect(compiles=0, misses=2):
        _check(compiled, 9, 14)
        _check(compiled, 14, 9)
    with recorder.expect(compiles=0, misses=0):
        _check(compiled, 13, 13)


@pytest.mark.parametrize("training", [False, True])
def test_attention_over_keys_and_values_of_two_symbols(training: bool, recorder: Recorder) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    compiled = torch.compile(attend, backend="dynaxla")
    before = recorder.snapshot()
    for length in (5, 6, 9, 33, 62, 63, 80):
        made = [torch.randn(2, 2, size, 8, requires_grad=training) for size in (3, length, length)]
        mine, eager = compiled(*made), attend(*made)
        compare([mine], [eager], f"at {length}")
        if training:
            gradients = [torch.autograd.grad(out.sum(), made) for out in (mine, eager)]
            compare(*gradients, f"gradients at {length}")
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert after.compiles - before.compiles == (6 if training else 3)  # at 5, and the buckets 64 and 128


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_over_more_values_than_keys_is_eagers(dynamic: bool, recorder: Recorder) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    compiled = torch.compile(attend, backend="dynaxla", dynamic=dynamic)
    before = recorder.snapshot()
    for keys, values in ((7, 9), (8, 12)):
        made = [torch.randn(1, 2, size, 8) for size in (5, values, values)]
        # Eager reads as many keys as there are values: those behind the last ones are to be this test's, and no one's else.
        made[1] = made[1].view(-1)[: 2 * keys * 8].view(1, 2, keys, 8)
        with torch.no_grad():
            compare([compiled(*made)], [attend(*made)], f"at {keys} and {values}")
    fallbacks = recorder.snapshot().fallbacks[len(before.fallbacks) :]
    assert "attention over 7 keys and 9 values" in fallbacks[0]
    assert not [reason for reason in fallbacks if "internal_error" in reason]
