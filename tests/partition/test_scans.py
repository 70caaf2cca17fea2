"""Loops over places in buckets of places, and associative scans: such loops where states are large, otherwise trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops import map as map_

from dynaxla.custom_ops.reversed_scan import REVERSED_SCAN
from dynaxla.observe.recorder import Recorder
from dynaxla.options import DEBUG_VARIABLE
from tests.bucketing.eager_programs import eager_programs
from tests.bucketing.poison import poison_padding
from tests.lists import quick
from tests.partition.test_control_flow import Function, assert_same, compile_, lowered_functions
from tests.tolerances import assert_close


def scan_states(a: Tensor, b: Tensor, reverse: bool = False) -> Any:
    def combine(x: Any, y: Any) -> Any:
        return x[0] * y[0], x[1] * y[0] + y[1]

    return associative_scan(combine, (a, b), 1, reverse, combine_mode="generic")


def step_through_states(a: Tensor, b: Tensor, reverse: bool = False) -> Any:
    """What `scan_states` computes, one place after another."""
    if reverse:
        return [states.flip(1) for states in step_through_states(a.flip(1), b.flip(1))]
    products, states = [a[:, 0]], [b[:, 0]]
    for place in range(1, a.shape[1]):
        products.append(products[-1] * a[:, place])
        states.append(states[-1] * a[:, place] + b[:, place])
    return [torch.stack(products, 1), torch.stack(states, 1)]


def test_a_scan_is_captured_for_sizes_up_to_a_power_of_two(recorder: Recorder) -> None:
    """torch's own implementation asks of every half of a size whether it is even."""
    compiled, before = compile_(scan_states), len(recorder.snapshot().captured)
    with eager_programs(), torch.no_grad():
        for size in (23, 9, 64, 5, 38, 51, 65, 100, 128, 77):  # one alone, those up to 64, and those up to 128
            a, b = torch.rand(2, size, 3) + 0.5, torch.randn(2, size, 3)
            assert_same(step_through_states, compiled, a, b)
    assert len(recorder.snapshot().captured) - before == 3


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("places", [2, 9])
def test_a_scan_of_large_states_is_a_loop(recorder: Recorder, places: int, reverse: bool) -> None:
    a, b = torch.rand(2, places, 8192, dtype=torch.float64) + 0.5, torch.randn(2, places, 8192, dtype=torch.float64)
    before = lowered_functions()
    with recorder.expect(eager_ops=0), torch.no_grad():
        compiled = compile_(lambda a, b: scan_states(a, b, reverse), dynamic=False)
        assert_same(lambda a, b: step_through_states(a, b, reverse), compiled, a, b)
    assert lowered_functions() > before
    found = []
    for function in (compiled, lambda a, b: step_through_states(a, b, reverse)):
        inputs = a.clone().requires_grad_(), b.clone().requires_grad_()
        found.append(torch.autograd.grad(function(*inputs)[1].sin().sum(), inputs))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)


def scan_backwards(x: Tensor, flips: tuple[int, ...] = (0,)) -> Any:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return (state * 0.5 + row).clone(), state * row

    last, rows = scan(step, x.new_zeros(x.shape[1:]), x.flip(0))
    return last, rows.flip(flips)


@pytest.mark.parametrize(("flips", "reversals"), [((0,), 0), ((0, 1), 1), ((1,), 1)])
def test_a_scan_from_the_last_place_on_reverses_nothing(
    flips: tuple[int, ...], reversals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, f"dump={tmp_path},stages=stablehlo")
    x = torch.randn(5, 3)
    with torch.no_grad():
        assert_same(scan_backwards, compile_(scan_backwards, dynamic=False), x, flips)
    (program,) = tmp_path.rglob("*stablehlo*")
    assert ("stablehlo.reverse" in program.read_text()) == bool(reversals)


def test_a_scan_from_the_last_place_on_in_eager() -> None:
    def step(state: Tensor, row: Tensor) -> list[Tensor]:
        return [state * 0.5 + row, state * row]

    x = torch.randn(5, 3)
    last, rows = REVERSED_SCAN(step, [torch.zeros(3)], [x], ())
    states = [torch.zeros(3)]
    for row in x.flip(0):
        states.append(states[-1] * 0.5 + row)
    assert_close(last, states.pop())
    assert_close(rows, torch.stack(states).flip(0) * x)


def test_gradients_of_a_scan_of_zero_states() -> None:
    """What is before the first place is no state: its gradient would be zero times a derivative that is infinite."""

    def combine(x: Any, y: Any) -> Any:
        return x[0] * y[0], (x[1] * y[0]).sqrt() + y[1]

    def function(a: Tensor, b: Tensor) -> Tensor:
        return associative_scan(combine, (a, b), 0, combine_mode="generic")[1]

    def step_through(a: Tensor, b: Tensor) -> Tensor:
        states = [b[0]]
        for place in range(1, a.shape[0]):
            states.append((states[-1] * a[place]).sqrt() + b[place])
        return torch.stack(states)

    a, b = torch.rand(4, 16384) + 0.5, torch.rand(4, 16384) + 0.5
    a[0] = 0
    found = []
    for each in (compile_(function, dynamic=False), step_through):
        inputs = a.clone().requires_grad_(), b.clone().requires_grad_()
        found.append(torch.autograd.grad(each(*inputs).sum(), inputs))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x.double() + y.double()


NO_LOOPS: dict[str, tuple[Function, Function, bool | None, Function]] = {
    "one place": (scan_states, step_through_states, False, lambda a, b: (a[:, :1], b[:, :1])),
    "states of another dtype": (
        lambda x, _: associative_scan(add, x, 0, combine_mode="generic"),
        lambda x, _: x.double().cumsum(0),
        False,
        lambda a, b: (a.float(), b),
    ),
    "sizes that vary": (scan_states, step_through_states, True, lambda a, b: (a, b)),
    "transforms": (
        torch.vmap(scan_states),
        torch.vmap(step_through_states),
        False,
        lambda a, b: (a[None], b[None]),
    ),
}


@pytest.mark.parametrize("why", quick(list(NO_LOOPS), "one place", "states of another dtype"))
def test_scans_of_large_states_that_cannot_be_loops(recorder: Recorder, why: str) -> None:
    function, expected, dynamic, change = NO_LOOPS[why]
    before, x = lowered_functions(), torch.randn(5, 3, 16384, dtype=torch.float64)
    with recorder.expect(eager_ops=0), torch.no_grad():
        assert_same(expected, compile_(function, dynamic), *change(x.abs() + 0.5, x))
    assert lowered_functions() == before


def recur(x: Tensor, w: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h * 2

    last, every = scan(step, x.new_zeros(3, 4), x)
    return last, every.sum(0), every[-1]


def recur_in_turn(x: Tensor, w: Tensor) -> Any:
    return recur(torch.cat([x[1:], x[:1] + 1]).flip(0), w)  # whose padding is in front, and between places


def map_rows(x: Tensor, w: Tensor) -> Any:
    return map_(lambda row, w: torch.softmax(row @ w, -1) * row.sum(), x, w)


@pytest.mark.parametrize("function", [recur, recur_in_turn, map_rows])
@pytest.mark.parametrize("compiles", quick([False, True], False))
def test_loops_over_places_run_in_buckets(recorder: Recorder, function: Function, compiles: bool) -> None:
    compiled, before = compile_(function), recorder.snapshot()
    w = torch.randn(4, 4, dtype=torch.float64) / 2
    with poison_padding() if compiles else eager_programs():
        for places in (5, 9, 17, 23, 3):
            x = torch.randn(places, 3, 4, dtype=torch.float64)
            with torch.no_grad():
                assert_same(function, compiled, x, w)
            found = []
            for one in (compiled, function):
                inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
                results = one(*inputs)
                total = sum(y.sin().sum() for y in (results if isinstance(results, tuple) else (results,)))
                found.append(torch.autograd.grad(total, inputs))
            for actual, expected in zip(*found, strict=True):
                assert_close(actual, expected)
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert (
        after.compiles - before.compiles <= 3 * 5
    )  # for inference, forward and backward; buckets of 5, of 4, 8, 16, 24


def test_an_associative_scan_of_large_states_runs_in_buckets(recorder: Recorder) -> None:
    compiled, before = compile_(scan_states), recorder.snapshot()
    with poison_padding(), torch.no_grad():
        for places in (5, 9, 17, 18, 20, 23, 3, 2, 1):
            a, b = torch.rand(2, places, 8192) + 0.5, torch.randn(2, places, 8192)
            assert_same(step_through_states, compiled, a, b)
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert len(after.captured) - len(before.captured) == 3  # 5 alone, 2 and more, 1
    assert after.compiles - before.compiles <= 6


def test_a_loop_of_rows_that_vary_has_buckets(recorder: Recorder) -> None:
    compiled, w = compile_(map_rows, dynamic=True), torch.randn(4, 4)
    with eager_programs(), recorder.expect(compiles=1), torch.no_grad():
        for places, rows in ((5, 7), (6, 6), (7, 8)):
            assert_same(map_rows, compiled, torch.randn(places, rows, 4), w)
