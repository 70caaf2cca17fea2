"""What a further bucket takes from those before it is what it would be if made anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.nn import functional as F

import dynaxla
from dynaxla.bucketing import padded_graph_builder
from dynaxla.lowering.call_graph import OpCall, call_graph
from dynaxla.lowering.function_cache import FunctionCache
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.shape_templates import CallSizes, ShapeTemplates
from dynaxla.lowering.stablehlo_functions import FunctionFinisher, StablehloFunction
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.options import Options
from dynaxla.pipeline import Pipeline
from dynaxla.torch_api.fakes import FakeTensorMode
from dynaxla.torch_api.meta_kernels import run_meta_kernel
from tests.bucketing.eager_programs import EagerExecutable, Runs, eager_programs
from tests.bucketing.random_sized import draw
from tests.bucketing.sized_runs import cases, draw_run
from tests.random_graphs.random_programs import make_inputs

SIZES = ((2, 6), (3, 20), (20, 500), (6, 40), (5, 9), (11, 70), (3, 60), (9, 50), (12, 28), (7, 90))


class Layer(nn.Module):
    """What a language model does to sizes: lookups, attention, norms, masks, positions, means over real elements."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(512, 16)
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = ids.shape
        x = self.words(ids) + self.places(torch.arange(length))
        q, k, v = self.inner(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.outer(attended.transpose(1, 2).reshape(batch, length, 16)))
        weights = (x @ x.transpose(1, 2)).softmax(-1)
        return nn.functional.gelu(weights @ x).mean(1), x[:, -1].tanh().amax(-1)


def specs(made: Any) -> list[Any]:
    """What tensors are, but for the strides of dims of one element, which reach nothing."""
    values = made if isinstance(made, (tuple, list)) else (made,)
    return [
        (v.dtype, v.device, v.shape, [s for s, n in zip(v.stride(), v.shape, strict=True) if n != 1])
        for v in values
        if isinstance(v, torch.Tensor)
    ]


@pytest.fixture
def results_compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What calls give by their meta kernels is compared with what fake tensors give; the ops that were."""
    compared: list[str] = []

    def both(mode: FakeTensorMode, op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = run_meta_kernel(mode, op, args, kwargs)
        with mode:
            wanted = op(*args, **kwargs)
        assert specs(made) == specs(wanted), op
        compared.append(str(op))
        return made

    monkeypatch.setattr(padded_graph_builder, "run_meta_kernel", both)
    return compared


@torch.no_grad()
def test_meta_kernels_give_what_fake_tensors_give(results_compared: list[str]) -> None:
    model = Layer().eval()
    with eager_programs():
        compiled = torch.compile(model, backend="dynaxla", dynamic=True)
        for size in SIZES[:4]:
            compiled(torch.randint(0, 50, size))
    assert {"aten.reshape.default", "dynaxla.linear.default", "aten.native_layer_norm.default"} <= set(results_compared)


@pytest.mark.faulty  # one of torch's own, which sized_runs tells apart
@pytest.mark.filterwarnings("ignore")
def test_meta_kernels_give_what_fake_tensors_give_in_random_programs(results_compared: list[str], full: bool) -> None:
    random = Random(12)
    for _ in range(30 if full else 6):
        if (run := draw_run(random, 6)) is not None:
            list(cases(run))
    assert len(set(results_compared)) > 10


@pytest.fixture
def functions_compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Functions that were written are compared with those lowered anew; for each program how many it has, and were lowered.

    What torch-mlir makes of a call twice is not always one text (it folds constants by their company), so that only the
    written ones are.
    """
    store, counts, lowered, written = FunctionTable(), [], [], []
    learn, write = ShapeTemplates.learn, ShapeTemplates.function

    def count(self: ShapeTemplates, call: OpCall, function: StablehloFunction, finisher: FunctionFinisher) -> None:
        lowered.append(call.key)
        learn(self, call, function, finisher)

    def tell(self: ShapeTemplates, call: OpCall, finisher: FunctionFinisher) -> StablehloFunction | None:
        function = write(self, call, finisher)
        if function is not None:
            written.append(call.key)
        return function

    def compile_both(pipeline: Pipeline, graph: Graph, spent: CompileTiming, *, fold: bool = False) -> Any:
        calls, before = call_graph(graph), len(lowered)
        lowerer = dataclasses.replace(
            pipeline.make_lowering(), store=store, function_cache=FunctionCache.of(None, Options())
        )
        functions = lowerer.functions(calls)
        counts.append((len(calls.distinct), len(lowered) - before))
        anew = dataclasses.replace(lowerer, store=FunctionTable()).functions(calls)
        for key in set(written) & functions.keys():
            assert functions[key] == anew[key]
        return EagerExecutable(graph, Runs(), pipeline.client)

    monkeypatch.setattr(ShapeTemplates, "learn", count)
    monkeypatch.setattr(ShapeTemplates, "function", tell)
    with eager_programs(), mock.patch.object(Pipeline, "compile", compile_both):
        yield counts


@torch.no_grad()
def test_functions_at_other_sizes_are_those_that_would_be_lowered(functions_compared: list[tuple[int, int]]) -> None:
    model = Layer().eval()
    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    for size in SIZES:
        compiled(torch.randint(0, 50, size))
    lowered = [lowered for _, lowered in functions_compared]
    assert len(lowered) >= 8
    assert max(lowered[-3:]) <= 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(recompile_limit=64)
@torch.no_grad()
def test_functions_of_random_programs_are_those_that_would_be_lowered(
    functions_compared: list[tuple[int, int]],
) -> None:
    random = Random(5)
    options = {"buckets": dynaxla.Multiples(4)}
    for _ in range(3):
        trials = [{"s": random.randint(4, 40), "t": random.randint(4, 40)} for _ in range(7)]
        drawn = draw(random, trials)
        torch._dynamo.reset()
        compiled = torch.compile(drawn.program.function(), backend="dynaxla", dynamic=True, options=options)
        for sizes in trials:
            compiled(*make_inputs(drawn.at(sizes).inputs))
    assert sum(distinct - lowered for distinct, lowered in functions_compared) > 20


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.mean((0, 2)), x.var((1, 3)), x.std((0, 2, 3)), F.batch_norm(x, None, None, training=True)


def _norms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.group_norm(x, 2), F.instance_norm(x), F.layer_norm(x, x.shape[1:]), F.rms_norm(x, x.shape[-1:])


def _resized(x: torch.Tensor, to: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return (
        F.interpolate(x, to, mode="bilinear"),
        F.interpolate(x, to, mode="bicubic", align_corners=True),
        F.interpolate(x, to),
        F.adaptive_avg_pool2d(x, to),
        F.affine_grid(x[:, :1, 0, 0].repeat(1, 6).view(-1, 2, 3), [x.shape[0], 1, *to]),
    )


def _products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    windows = torch.ones(x.shape[3], x.shape[1], 1, 1)
    return F.conv2d(x, windows), torch.einsum("abcd,aecd->be", x, x), F.unfold(x, 2), x.transpose(1, 2).flatten(1)


def _others(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    transformed = torch.fft.fftn(x, dim=(0, 2), norm="ortho").real
    shifted = x.roll((1, 2), (0, 3)), F.avg_pool2d(x, 2, padding=1, count_include_pad=False)
    return transformed, F.mse_loss(x, x * 2), x.cumsum(2), *shifted, F.pixel_shuffle(x, 2)


COINCIDING = (_statistics, _norms, _products, _others)
EVEN = (2, 4, 6, 8, 12, 16)


def _compile_once(function: Callable[..., Any], *args: Any) -> None:
    torch._dynamo.reset()
    torch.compile(function, backend="dynaxla", dynamic=False)(*args)


@pytest.mark.parametrize("function", COINCIDING, ids=lambda f: f.__name__[1:])
@torch.no_grad()
def test_a_number_that_is_equal_by_chance_is_not_kept(
    function: Callable[..., Any], functions_compared: list[tuple[int, int]], full: bool
) -> None:
    """Sizes of which many products and quotients are equal: that of a mean over dims apart is written as one constant."""
    random = Random(3)
    if function is _statistics:
        for shape in ((8, 6, 2, 2), (4, 6, 4, 2), (8, 12, 2, 2), (5, 6, 4, 2), (3, 12, 4, 2)):
            _compile_once(function, torch.ones(shape))
    for _ in range(40 if full else 6):
        batch, height, width = random.choices(EVEN, k=3)
        _compile_once(function, torch.ones(batch, random.choice((4, 8, 12)), height, width))


@torch.no_grad()
def test_a_scale_that_is_equal_by_chance_is_not_kept(functions_compared: list[tuple[int, int]], full: bool) -> None:
    random = Random(3)
    for _ in range(40 if full else 6):
        height, width, *to = random.choices(EVEN, k=4)
        _compile_once(_resized, torch.ones(2, 3, height, width), tuple(to))


def test_a_long_list_of_sizes_has_no_products_of_any_of_them() -> None:
    call = CallSizes("split", tuple(range(2, 102)), ((0, 96), (96, 100)), (0,))
    assert len(call.counts) == 11


COMPUTED: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], tuple[tuple[int, int], ...]]] = {
    "an element, the last one at first": (lambda x, i: x[i] * 2, ((4, 3), (5, 4), (8, 7), (9, 4), (7, 3))),
    "a shift by half at first": (lambda x, i: x.roll(i), ((4, 2), (6, 3), (8, 4), (9, 4), (7, 3))),
    "a shift by all but one at first": (lambda x, i: x.roll(i), ((4, 3), (5, 4), (8, 7), (7, 4), (6, 3))),
}
"""Calls of which an op computes a number from an argument and a size, which is another size in the first calls alone; their
lengths and arguments."""


@pytest.mark.parametrize("name", COMPUTED)
def test_numbers_that_an_op_computes_are_not_taken_for_sizes(
    name: str, functions_compared: list[tuple[int, int]]
) -> None:
    function, calls = COMPUTED[name]
    for length, argument in calls:
        torch._dynamo.reset()
        x = torch.randn(length)
        compiled = torch.compile(function, backend="dynaxla", dynamic=False)
        torch.testing.assert_close(compiled(x, argument), function(x, argument))
    assert len(functions_compared) == len(calls)
