"""Histograms between given edges, and reductions of segments, against eager torch."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import dynaxla
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.dtypes import FLOATS, WIDE_FLOATS
from tests.ops.rule_check import Call, Catch, assert_all_same, check_opinfo, refusal, run_rule, targets_of, to_torch
from tests.tolerances import assert_close

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
COUNTS, COUNTS_OF_POINTS = aten.histogram.bins_tensor, aten._histogramdd_from_bin_tensors.default
SEGMENTS = aten.segment_reduce.default


def test_segments_agree_with_eager_on_opinfo_samples(full: bool) -> None:
    check_opinfo("_segment_reduce", targets_of("segments"), full, sorted(FLOATS, key=str))


def test_histograms_of_a_range_agree_with_eager_on_opinfo_samples(full: bool) -> None:
    check_opinfo("histc", targets_of("histograms"), full)


@pytest.mark.parametrize("name", ["histogram", "histogramdd"])
def test_histograms_agree_with_eager_on_opinfo_samples_with_edges(name: str, full: bool) -> None:
    """Every second sample has edges: `check_opinfo` takes the others."""
    [info] = [info for info in op_db if info.name == name]
    catch = Catch(targets_of("histograms"), full)
    for catch.dtype in WIDE_FLOATS:
        for sample in info.sample_inputs("cpu", catch.dtype):
            with catch:
                info.op(sample.input, *sample.args, **sample.kwargs)
    assert {call.args[0].dtype for call in catch.calls} == WIDE_FLOATS
    assert_all_same(catch.calls)


EDGES = torch.tensor([0.0, 1, 2, 3])
VALUES = torch.tensor([-1.0, 0, 1, 2, 3, 3.5, 0.5, 2.5, NAN, INF, -INF, -0.0])
WEIGHTS = torch.tensor([NAN, 2, 3, 0.5, 0.25, NAN, -1, INF, 1, 1, 1, 4])
HISTOGRAMS: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = [
    (VALUES, EDGES, None),
    (VALUES, EDGES, WEIGHTS),
    (VALUES.reshape(3, 4), EDGES, WEIGHTS.reshape(3, 4)),
    (VALUES, torch.tensor([-INF, 0, INF]), None),
    (VALUES, torch.tensor([1.0, 1, 2, 2, 3, 3, 3]), None),
    (VALUES, torch.tensor([3.0, 2, 1, 0]), None),
    (VALUES, torch.tensor([0.0, NAN]), None),
    (VALUES, torch.tensor([NAN, 1.0]), None),
    (VALUES[:0], EDGES, None),
    (VALUES[:1], EDGES, None),
    (VALUES[1], EDGES, None),
]


def test_edges_belong_to_the_bins_of_eager() -> None:
    calls = []
    for case, dtype, density in product(HISTOGRAMS, WIDE_FLOATS, (False, True)):
        x, bins, weight = (None if t is None else t.to(dtype) for t in case)
        assert refusal(COUNTS, (x, bins), {"weight": weight}) is None
        calls.append(Call.of(COUNTS, x, bins, weight=weight, density=density))
    assert_all_same(calls)


def test_points_are_counted_where_all_coordinates_are_inside() -> None:
    x = torch.cartesian_prod(VALUES, VALUES, torch.tensor([0.0, 1.0, NAN])).reshape(12, 12, 3, 3)
    bins, weight = [EDGES, EDGES[:2], torch.tensor([-1.0, 0.5, 1])], torch.rand(12, 12, 3)
    given = ((x, None), (x, weight), (x[:0], None), (x[:0], weight[:0]))
    assert_all_same(
        [Call.of(COUNTS_OF_POINTS, x, bins, weight=w, density=d) for (x, w), d in product(given, (False, True))]
    )


def test_16_bit_floats_are_counted_in_eager_where_large_counts_stop() -> None:
    assert refusal(COUNTS, (VALUES.bfloat16(), EDGES.bfloat16()), {})


DATA = torch.tensor([1.0, -2, 3, NAN, 5, -INF, INF, 0.5, -0.0, 2])
TABLE = torch.randn(3, 5, 2)
RUNS: list[tuple[torch.Tensor, dict[str, Any]]] = [
    (DATA, {"lengths": torch.tensor([2, 0, 3, 1, 4])}),
    (DATA, {"lengths": torch.tensor([0, 0, 10, 0], dtype=torch.int32)}),
    (DATA, {"lengths": torch.tensor([2, 1]), "unsafe": True}),
    (DATA, {"offsets": torch.tensor([0, 2, 2, 7, 10])}),
    (DATA, {"offsets": torch.tensor([1, 1, 4], dtype=torch.int32)}),
    (DATA[:0], {"lengths": torch.tensor([0, 0])}),
    (DATA[:0].reshape(0, 2), {"lengths": torch.tensor([0])}),
    (DATA.reshape(5, 2), {"lengths": torch.tensor([1, 0, 4])}),
    (TABLE, {"lengths": torch.tensor([[1, 4], [5, 0], [2, 3]]), "axis": 1}),
    (TABLE, {"lengths": torch.tensor([[1, 4], [5, 0], [2, 3]]), "axis": -2}),
    (TABLE, {"offsets": torch.tensor([[0, 1, 5], [0, 5, 5], [1, 2, 4]]), "axis": 1}),
    (TABLE.mT, {"lengths": torch.tensor([[[1, 4], [0, 5]]] * 3), "axis": 2}),
]


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "min", "amax", "amin"])
def test_segments_are_reduced_as_by_eager(reduce: str, full: bool) -> None:
    calls = []
    initials = (None, 0.5, NAN, 2) if full else (None, NAN)  # numbers: test_segments_of_every_float_are_reduced
    for dtype, initial in product(FLOATS if full else (torch.float32,), initials):
        for data, how in RUNS:
            assert refusal(SEGMENTS, (data.to(dtype), reduce), how) is None
            calls.append(Call.of(SEGMENTS, data.to(dtype), reduce, **how, initial=initial))
    assert_all_same(calls)


@pytest.mark.parametrize("dtype", sorted(FLOATS - {torch.float32}, key=str))
def test_segments_of_every_float_are_reduced(dtype: torch.dtype) -> None:
    how = ("sum", None), ("mean", None), ("max", 2), ("min", None), ("prod", 0.5)
    assert_all_same([Call.of(SEGMENTS, DATA.to(dtype), r, **RUNS[0][1], initial=initial) for r, initial in how])


@pytest.mark.parametrize(
    "how",
    [
        {"lengths": torch.tensor([2, 2])},
        {"lengths": torch.tensor([-1, 11])},
        {"lengths": torch.tensor([11]), "unsafe": True},
        {"offsets": torch.tensor([0, 4, 2])},
        {"offsets": torch.tensor([-1, 4])},
        {"offsets": torch.tensor([0, 11])},
    ],
)
def test_segments_that_are_no_runs_of_the_elements_give_nan(how: dict[str, Any]) -> None:
    assert to_torch(run_rule(SEGMENTS, (DATA.nan_to_num(), "sum"), how)).isnan().all()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((DATA, "sum"), {}),
        ((DATA, "sum"), {"lengths": torch.tensor([10]), "offsets": torch.tensor([0, 10])}),
        ((DATA, "sum"), {"indices": torch.zeros(10, dtype=torch.int64)}),
        ((DATA, "sum"), {"lengths": torch.tensor([10.0])}),
        ((DATA, "median"), {"lengths": torch.tensor([10])}),
        ((torch.arange(3), "sum"), {"lengths": torch.tensor([3])}),
        ((TABLE, "sum"), {"lengths": torch.tensor([3]), "axis": 1}),
        ((TABLE, "sum"), {"lengths": torch.tensor([[5]] * 3)}),
        ((DATA, "sum"), {"lengths": torch.tensor([[5, 5]]), "axis": 0}),
    ],
)
def test_calls_that_eager_refuses_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert refusal(SEGMENTS, args, kwargs)


def _histograms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    edges = torch.tensor([-1.0, 0, 0.5, 1])
    counts, returned = torch.histogram(x.sin(), edges)
    points = torch.histogramdd(torch.stack((x.sin(), x.cos()), 1), [edges, edges + 0.25], density=True)
    return counts * 2, returned, points.hist


def _means(x: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(x.exp(), "mean", lengths=torch.tensor([3, 0, 2]), unsafe=True)


@pytest.mark.parametrize(("function", "dynamic"), [(_histograms, False), (_means, False), (_means, True)])
def test_graphs_have_a_program_per_size(function: Any, dynamic: bool, recorder: Recorder) -> None:
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic, options={"fallback": "error"})
    with recorder.expect(compiles=2, eager_ops=0):
        for size in (9, 14, 9):
            x = torch.randn(size)
            for actual, expected in zip(tree_leaves(compiled(x)), tree_leaves(function(x)), strict=True):
                assert_close(actual, expected)


def test_histograms_of_sizes_that_vary_are_left_to_eager() -> None:
    compiled = torch.compile(_histograms, backend="dynaxla", dynamic=True)
    for size in (9, 14):
        x = torch.randn(size)
        for actual, expected in zip(compiled(x), _histograms(x), strict=True):
            assert_close(actual, expected)
    assert any("fake tensors" in str(graph.ended) for graph in dynaxla.read_metrics().captured)


def test_the_gradient_of_a_segment_is_eagers() -> None:
    def loss(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return (torch.segment_reduce(x * 2, "sum", offsets=offsets) ** 2).sum()

    offsets, x = torch.tensor([0, 2, 2, 5]), torch.randn(5, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x, offsets), x)
    (actual,) = torch.autograd.grad(torch.compile(loss, backend="dynaxla")(x, offsets), x)
    assert_close(actual, expected)
