"""Associative scans: a loop over places where states are large, otherwise a tree that serves many sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan

from dynaxla.observe.recorder import Recorder
from tests.bucketing.eager_programs import eager_programs
from tests.partition.test_control_flow import assert_same, compile_, lowered_functions
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
    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        compiled = compile_(lambda a, b: scan_states(a, b, reverse), dynamic=False)
        assert_same(lambda a, b: step_through_states(a, b, reverse), compiled, a, b)
    assert lowered_functions() > before
    found = []
    for function in (compiled, lambda a, b: step_through_states(a, b, reverse)):
        inputs = a.clone().requires_grad_(), b.clone().requires_grad_()
        found.append(torch.autograd.grad(function(*inputs)[1].sin().sum(), inputs))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)


def test_scans_of_large_states_that_cannot_be_loops(recorder: Recorder) -> None:
    """One place, states of another dtype than the scanned elements, sizes that vary, and transforms."""
    before, x = lowered_functions(), torch.randn(5, 3, 16384, dtype=torch.float64)
    states = x.abs() + 0.5, x

    def add(x: Tensor, y: Tensor) -> Tensor:
        return x.double() + y.double()

    with recorder.expect(eager_ops=0), torch.no_grad():
        one = states[0][:, :1], states[1][:, :1]
        assert_same(step_through_states, compile_(scan_states, dynamic=False), *one)
        summed = compile_(lambda x: associative_scan(add, x, 0, combine_mode="generic"), dynamic=False)
        assert_same(lambda x: x.double().cumsum(0), summed, x.float())
        assert_same(step_through_states, compile_(scan_states, dynamic=True), *states)
        mapped = compile_(torch.vmap(scan_states), dynamic=False)
        assert_same(torch.vmap(step_through_states), mapped, *(x[None] for x in states))
    assert lowered_functions() == before
