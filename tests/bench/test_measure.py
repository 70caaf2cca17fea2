"""Measuring a case: results are compared before anything is timed, and what is counted is what happened."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.bench.backends import BenchBackend
from dynaxla.bench.cases import Case
from dynaxla.bench.measure import TimingSettings, measure_case
from dynaxla.bench.model_cases import ModelRequest
from dynaxla.bench.workloads import Workload

FAST = TimingSettings(seconds=0.0, rounds=3, warm=1, repeats=1)
X = torch.arange(4.0)


def _measure_ways(check: str = "first", **ways: Any) -> Any:
    made = {name: lambda way=way: way for name, way in {"eager": lambda number: X, **ways}.items()}
    return measure_case(Case("case", made, check=check), FAST)  # type: ignore[arg-type]


def test_ways_take_turns_and_have_a_sample_of_every_round() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: lambda number: order.append(name) or X for name in ("eager", "other")}
    found = measure_case(Case("case", ways), FAST)
    assert order[:2] == ["eager", "other"]  # the first pass
    assert order[-6:] == ["eager", "other"] * 3
    assert [len(result.samples_s) for result in found.results] == [3, 3]
    assert [result.check.status for result in found.results] == ["unchecked", "same"]


def test_ways_one_after_the_other() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: lambda number: order.append(name) or X for name in ("eager", "other")}
    measure_case(Case("case", ways, in_turn=False), FAST)
    assert order[-8:] == ["eager"] * 4 + ["other"] * 4


def test_other_results_are_not_timed() -> None:
    found = _measure_ways(wrong=lambda number: X + 0.01, cast=lambda number: X.double(), more=lambda number: (X, X))
    for name, said in {"wrong": "off by", "cast": "dtype torch.float64", "more": "2 tensors, expected 1"}.items():
        result = found.of(name)
        assert result.check.status == "differs"
        assert said in result.check.message
        assert result.samples_s == []
    assert len(found.of("eager").samples_s) == 3


def test_a_way_that_raises_leaves_the_others() -> None:
    def fail(number: int) -> Any:
        raise ValueError("no such kernel")

    found = _measure_ways(bad=fail, good=lambda number: X.clone())
    assert (found.of("bad").check.status, found.of("good").check.status) == ("failed", "same")
    assert "ValueError: no such kernel" in found.of("bad").check.message
    with pytest.raises(ValueError, match="no such kernel"):
        measure_case(Case("case", {"eager": lambda: fail}), FAST)


def test_what_changes_later_is_seen_where_every_result_is_compared() -> None:
    calls = itertools.count()
    found = _measure_ways("always", late=lambda number: X + (next(calls) > 2))
    assert found.of("late").check.status == "differs"
    assert found.of("late").samples_s == []


def test_random_results_are_neither_right_nor_wrong() -> None:
    ways = {"eager": lambda: lambda number: torch.rand(4), "other": lambda: lambda number: torch.randn(4)}
    assert measure_case(Case("case", ways), FAST).results[1].check.status == "random"
    assert measure_case(Case("case", ways, check="never"), FAST).results[1].check.status == "unchecked"


def test_not_a_number_is_one_in_the_same_places_alone() -> None:
    with_nan = torch.tensor([0.0, 1.0, float("nan"), float("inf")])
    found = measure_case(
        Case(
            "case",
            {
                "eager": lambda: lambda number: with_nan,
                "same": lambda: lambda number: with_nan.clone(),
                "other": lambda: lambda number: torch.tensor([0.0, 1.0, float("inf"), float("nan")]),
            },
        ),
        FAST,
    )
    assert [result.check.status for result in found.results[1:]] == ["same", "differs"]


def test_a_model_on_this_package_and_on_the_device() -> None:
    backends = [BenchBackend.parse(text) for text in ("eager", "dynaxla", "device", "device:mode=eager")]
    case = ModelRequest("tests.bench.models:make_linear").make_case(backends, "eager")
    found = measure_case(case, FAST)
    assert [result.check.status for result in found.results] == ["unchecked", "same", "same", "same"]
    compiled = found.of("dynaxla")
    assert compiled is not None
    assert compiled.first is not None
    assert (sum(compiled.programs), compiled.first.graphs, compiled.recompiles) == (1, 1, 0)
    assert set(compiled.first.stages) == {"capture", "autograd", "lowering", "compile", "rest"}
    assert compiled.first.stages["capture"] > 0
    assert sum(compiled.first.stages.values()) == pytest.approx(compiled.first.seconds, rel=0.2)
    assert "Linear, 15 parameters float32" in found.about


def test_sizes_that_vary_and_their_buckets() -> None:
    request = ModelRequest("tests.bench.models:make_embedded", ("tokens:1,mask:1=9..16",), 6)
    found = measure_case(request.make_case([BenchBackend.parse("eager"), BenchBackend.parse("dynaxla")], "eager"), FAST)
    assert len(found.inputs) == 6
    assert {name for sizes in found.inputs for name in sizes} == {"tokens:1"}
    assert all(9 <= sizes["tokens:1"] <= 16 for sizes in found.inputs)
    compiled = found.of("dynaxla")
    assert compiled is not None
    assert compiled.check.status == "same"
    assert len(compiled.samples_s) == 3 * 6
    assert compiled.recompiles == 0
    assert all(padded >= true > 0 for true, padded in compiled.elements)
    buckets = [dynaxla.Default().bucket(sizes["tokens:1"]) for sizes in found.inputs]
    varied = [pair for pair in compiled.elements if pair[1] != pair[0]]
    assert {padded for _, padded in varied} <= set(buckets)
    assert found.results[0].elements == []


def test_training_compares_gradients() -> None:
    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    class Wrong(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Gradient.apply(super().forward(x))  # type: ignore[no-any-return]

    right = nn.Linear(4, 3)
    wrong = Wrong(4, 3)
    wrong.load_state_dict(right.state_dict())
    calls = [((torch.randn(2, 4),), {})]
    eager = BenchBackend.parse("eager")
    ways = {
        name: lambda net=net: eager.prepare(Workload("net", net, calls), train=True)
        for name, net in {"eager": right, "wrong": wrong}.items()
    }
    assert measure_case(Case("case", ways), FAST).results[1].check.status == "differs"
    request = ModelRequest("tests.bench.models:make_normalized", train=True)
    found = measure_case(request.make_case([eager, BenchBackend.parse("dynaxla")], "eager"), FAST)
    assert found.results[1].check.status == "same"
    assert sum(found.results[1].programs) == 2  # forward and backward


def test_random_models_are_told_from_wrong_ones() -> None:
    request = ModelRequest("tests.bench.models:make_dropout")
    found = measure_case(request.make_case([BenchBackend.parse("eager"), BenchBackend.parse("dynaxla")], "eager"), FAST)
    assert found.results[1].check.status == "random"


def test_results_as_near_to_float64_as_eagers_are_the_same() -> None:
    """Numbers that lose digits: eager's are multiples of 1/16, those of the other way of 1/32."""
    x = torch.rand(4096)

    def measure(off: float, tolerance: float | None = None) -> Any:
        workload = Workload("sums", lambda x: (x + 1e6) - 1e6, [((x,), {})])
        ways = {
            "eager": partial(BenchBackend.parse("eager").prepare, workload, train=False),
            "other": lambda: lambda number: (x + 5e5) - 5e5 + off,
        }
        exact = partial(BenchBackend.prepare_in_float64, workload, train=False)
        return measure_case(Case("sums", ways, exact=exact, tolerance=tolerance), FAST).of("other")

    right, wrong = measure(0.0), measure(1.0)
    assert (right.check.status, right.check.message) == (
        "same",
        "beyond the tolerance, and as near to float64 as the baseline",
    )
    assert len(right.samples_s) == 3
    assert (wrong.check.status, wrong.samples_s) == ("differs", [])
    assert measure(0.0, tolerance=1e-3).check.status == "differs"  # who names one means it


def test_gradients_are_judged_by_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())))
    workload = Workload("norms", model, [((torch.randn(2, 16),), {})])
    run = BenchBackend.prepare_in_float64(workload, train=True)
    results, gradients = run(0)
    assert {each.dtype for each in (*results, *gradients)} == {torch.float64}
    assert {each.dtype for each in model.parameters()} == {torch.float32}
