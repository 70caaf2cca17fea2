"""Branches, loops, scans and regions that are compiled once: inside the executable, as eager computes them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.diagnostics import ReasonId
from dynaxla.errors import UnsupportedError
from dynaxla.lowering import stablehlo_module
from dynaxla.lowering.call_graph import op_call
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.jax_lowering import lower_bodies
from dynaxla.lowering.stablehlo_functions import FunctionFinisher
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime_state import process
from dynaxla.torch_api.overloads import REGIONS
from tests.lists import quick
from tests.precompile.test_compile_for_target import TARGET, needs_libtpu
from tests.tolerances import assert_close

Function = Callable[..., Any]


def compile_(function: Function, dynamic: bool | None = None, **options: Any) -> Function:
    return torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=dynamic, options=options)  # type: ignore


def assert_same(function: Function, compiled: Function, *args: Any) -> None:
    for actual, expected in zip(tree_leaves(compiled(*args)), tree_leaves(function(*args)), strict=True):
        assert_close(actual, expected)


def assert_same_gradients(function: Function, *args: Tensor, dynamic: bool | None = None) -> None:
    compiled = compile_(function, dynamic)
    found = []
    for one in (function, compiled):
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        total = sum(y.sin().sum() for y in tree_leaves(one(*inputs)) if y.requires_grad)
        total.backward()  # type: ignore[union-attr]
        found.append([x.grad for x in inputs if x.requires_grad])
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)


@torch.library.custom_op("control_flow_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


tripled.register_fake(torch.empty_like)


def branches(x: Tensor, y: Tensor) -> Tensor:
    z = torch.tanh(x)
    result: Tensor = torch.cond(z.sum() > 0, lambda a, b: a.sin() @ b, lambda a, b: (a - 1) @ b.cos(), (z, y))
    return result + 1


def test_both_branches_in_one_executable(recorder: Recorder) -> None:
    compiled = compile_(branches)
    y = torch.randn(3, 5)
    with recorder.expect(compiles=1, eager_ops=0):
        for x in (torch.ones(4, 3), -torch.ones(4, 3), torch.full((4, 3), torch.nan)):
            assert_same(branches, compiled, x, y)


def test_gradients_of_both_branches(recorder: Recorder) -> None:
    for x in (torch.ones(4, 3), -torch.ones(4, 3)):
        torch._dynamo.reset()
        with recorder.expect(compiles=2, eager_ops=0):
            assert_same_gradients(branches, x, torch.randn(3, 5))


def test_a_branch_in_a_loop_in_a_branch(recorder: Recorder) -> None:
    def turn(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cond(x.sum() > 10, lambda x: x / 2, lambda x: x * 3 + 1, (x,))

    def model(x: Tensor, turns: Tensor) -> Any:
        def looped(x: Tensor, turns: Tensor) -> Tensor:
            return while_loop(lambda i, x: i < turns, turn, (turns - turns, x))[1]

        return torch.cond(turns > 2, looped, lambda x, turns: x + turns, (x, turns))

    compiled = compile_(model)
    x = torch.rand(3)
    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        for turns in (1, 3, 7):
            assert_same(model, compiled, x, torch.tensor(turns))


def test_a_branch_may_call_a_registered_kernel(recorder: Recorder) -> None:
    dynaxla.register_lowering(tripled._opoverload, lambda x: x * jnp.asarray(3, x.dtype), replace=True)

    def model(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: tripled(x), lambda x: x.clone(), (x,))

    with recorder.expect(compiles=2, eager_ops=0), torch.no_grad():
        for x in (torch.ones(3), -torch.ones(3, 1)):
            torch._dynamo.reset()
            assert_same(model, compile_(model), x)


def test_a_loop_of_any_number_of_turns_is_compiled_once(recorder: Recorder) -> None:
    def newton(a: Tensor, start: Tensor, most: Tensor) -> Any:
        def goes_on(i: Tensor, x: Tensor) -> Tensor:
            return (i < most) & ((x * x - a).abs().max() > 1e-4)

        return while_loop(goes_on, lambda i, x: (i + 1, (x + a / x) / 2), (torch.zeros_like(most), start))

    compiled = compile_(newton)
    a = torch.rand(5) + 0.5
    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        for most in (0, 1, 3, 50):
            assert_same(newton, compiled, a, torch.ones(5), torch.tensor(most))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(recorder: Recorder, reverse: bool) -> None:
    def recurrent(h: Tensor, x: Tensor, w: Tensor) -> Any:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(x @ w + h)
            return new, new * 2

        return scan(step, h, x, reverse=reverse)

    h, x, w = torch.randn(2, 3), torch.randn(6, 2, 3), torch.randn(3, 3)
    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        assert_same(recurrent, compile_(recurrent), h, x, w)
    with recorder.expect(compiles=2, eager_ops=0):
        assert_same_gradients(recurrent, h, x, w)


def test_map_and_associative_scan(recorder: Recorder) -> None:
    def mapped(x: Tensor, w: Tensor) -> Any:
        return map_(lambda row, w: torch.softmax(row @ w, -1), x, w)

    def scanned(x: Tensor) -> Any:
        return associative_scan(torch.mul, x, 0, combine_mode="generic")

    x, w = torch.randn(4, 2, 3), torch.randn(3, 5)
    with recorder.expect(compiles=2, eager_ops=0), torch.no_grad():
        assert_same(mapped, compile_(mapped), x, w)
        assert_same(scanned, compile_(scanned), x)
    with recorder.expect(compiles=2, eager_ops=0):
        assert_same_gradients(mapped, x, w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_dtypes_in_branches_and_loops(recorder: Recorder, dtype: torch.dtype) -> None:
    def model(x: Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: x * 2 + 1, lambda x: x - 3, (x,))
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y + i.to(y.dtype)), (torch.tensor(0), y))

    compiled = compile_(model)
    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        for sign in (1, -1):
            assert_same(model, compiled, sign * torch.arange(1, 5).to(dtype))


def test_constants_in_branches(recorder: Recorder) -> None:
    def model(x: Tensor) -> Any:
        def first(x: Tensor) -> Tensor:
            return x + torch.tensor([1.5, 2.5, -3.0], dtype=torch.bfloat16)

        return torch.cond(x.sum() > 0, first, lambda x: x * torch.tensor([4, 5, 6]), (x,))

    compiled = compile_(model)
    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        for sign in (1, -1):
            assert_same(model, compiled, sign * torch.ones(2, 3))


@torch.library.custom_op("control_flow_tests::eager_only", mutates_args=())
def eager_only(x: Tensor) -> Tensor:
    return x * 5


eager_only.register_fake(torch.empty_like)


def test_what_a_branch_cannot_hold_is_named(recorder: Recorder) -> None:
    def model(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: eager_only(x), lambda x: x.clone(), (x * 2,)) + 1

    with recorder.expect(compiles=2, eager_ops=1), torch.no_grad():
        assert_same(model, compile_(model), torch.ones(3))
    assert "control_flow_tests.eager_only.default in its sub-graph: custom_op" in recorder.snapshot().fallbacks[-1]
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError) as caught, torch.no_grad():
        compile_(model, fallback="error")(torch.ones(3))
    assert [reason.id for reason in caught.value.reasons] == [ReasonId.HIGHER_ORDER]  # type: ignore[attr-defined]


@torch.library.custom_op("control_flow_tests::misregistered", mutates_args=())
def misregistered(x: Tensor) -> Tensor:
    return x + 5


misregistered.register_fake(torch.empty_like)


def test_what_jax_refuses_runs_in_eager(recorder: Recorder) -> None:
    dynaxla.register_lowering(misregistered._opoverload, lambda x: x.astype(jnp.int32), replace=True)

    def model(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: misregistered(x), lambda x: x.clone(), (x * 2,)) + 1

    compiled = compile_(model)
    with recorder.expect(compiles=2, eager_ops=1), torch.no_grad():
        for sign in (1, -1):
            assert_same(model, compiled, sign * torch.ones(3))
    assert "link_failed; JAX cannot trace the cond" in recorder.snapshot().fallbacks[-1]


class Layer(torch.nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(size)
        self.inward = torch.nn.Linear(size, 2 * size)
        self.outward = torch.nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.outward(torch.nn.functional.gelu(self.inward(self.norm(x))))
        return made


class Stack(torch.nn.Module):
    """Layers that are one function to torch.compile."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = call_layer(layer, x)
        return x


@torch.compiler.nested_compile_region
def call_layer(layer: Layer, x: Tensor) -> Tensor:
    made: Tensor = layer(x)
    return made


def lowered_functions() -> int:
    gc.collect()
    return sum(name.startswith(REGIONS) for name in process().functions.names)


@pytest.mark.parametrize("layers", quick([12, 48], 12))
@pytest.mark.parametrize("loop", [False, True])
def test_a_region_is_lowered_once_however_often_it_is_called(recorder: Recorder, layers: int, loop: bool) -> None:
    model, x = Stack(layers), torch.randn(3, 8)
    compiled = compile_(model, nested_regions="loop" if loop else "calls")
    with torch.no_grad():
        compile_(Layer())(x)  # what the layers' weights alone determine is lowered by rules of its own
    before = lowered_functions()
    with recorder.expect(compiles=1, folds=int(loop), eager_ops=0), torch.no_grad():
        assert_same(model, compiled, x)
    assert lowered_functions() - before == 1


def test_layers_in_a_loop_follow_their_weights(recorder: Recorder) -> None:
    model, x = Stack(6), torch.randn(3, 8)
    compiled = compile_(model, nested_regions="loop")
    with recorder.expect(compiles=1, folds=1, eager_ops=0), torch.no_grad():
        assert_same(model, compiled, x)
        model.layers[4].inward.weight.mul_(-2)  # type: ignore[union-attr, operator]
        assert_same(model, compiled, x)
        model.layers[2].norm.bias.data += 1  # type: ignore[union-attr, operator]
        assert_same(model, compiled, x)


class Woven(torch.nn.Module):
    """Layers that carry two values, and share a table and a weight."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.own = torch.nn.ParameterList(torch.randn(4, 4) for _ in range(layers))
        self.tied = torch.nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        y, table = x * 2, table.cos()
        for weight in self.own:
            x, y = weave(x, y, table, weight, self.tied, 3)
        return x, y + 1


@torch.compiler.nested_compile_region
def weave(x: Tensor, y: Tensor, table: Tensor, weight: Tensor, tied: Tensor, times: int) -> tuple[Tensor, Tensor]:
    return torch.tanh(y @ weight) * table, (x + tied) / times


def test_a_chain_of_several_values_with_shared_operands(recorder: Recorder) -> None:
    model = Woven(5)
    with recorder.expect(compiles=1, folds=1, eager_ops=0), torch.no_grad():
        assert_same(model, compile_(model, nested_regions="loop"), torch.randn(3, 4), torch.randn(3, 4))


def test_layers_whose_results_are_read_are_calls(recorder: Recorder) -> None:
    stack = Stack(5)

    def model(x: Tensor) -> list[Tensor]:
        found = []
        for layer in stack.layers:
            x = call_layer(layer, x)
            found.append(x)
        return found

    with recorder.expect(compiles=1, folds=0, eager_ops=0), torch.no_grad():
        assert_same(model, compile_(model, nested_regions="loop"), torch.randn(3, 8))


def test_layers_of_other_shapes_between_are_no_part_of_the_chain(recorder: Recorder) -> None:
    wide = torch.nn.ModuleList(Layer(16) for _ in range(4))
    stack, up = Stack(4), torch.nn.Linear(8, 16)

    def model(x: Tensor) -> Tensor:
        x = up(stack(x))
        for layer in wide:
            x = call_layer(layer, x)
        return x

    with recorder.expect(compiles=1, folds=1, eager_ops=0), torch.no_grad():
        assert_same(model, compile_(model, nested_regions="loop"), torch.randn(3, 8))


@pytest.mark.parametrize("regions", ["calls", "loop"])
def test_gradients_through_regions(recorder: Recorder, regions: str) -> None:
    model = Stack(5)
    x = torch.randn(3, 8)
    with recorder.expect(compiles=2, eager_ops=0):
        compile_(model, nested_regions=regions)(x).sin().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    model(x).sin().sum().backward()
    for actual, parameter in zip(found, model.parameters(), strict=True):
        assert_close(actual, parameter.grad)  # type: ignore[arg-type]


def test_regions_of_sizes_that_vary_run_in_buckets(recorder: Recorder) -> None:
    model = Stack(3)
    compiled = compile_(model)
    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        for size in (13, 14, 16):
            x = torch.randn(size, 8)
            dynaxla.mark_bucketed(x, 0)
            assert_same(model, compiled, x)


def test_gradients_through_regions_of_sizes_that_vary(recorder: Recorder) -> None:
    model = Stack(3)
    compiled = compile_(model)
    with recorder.expect(compiles=2, eager_ops=0):
        for size in (13, 14, 16):
            found = []
            for one in (compiled, model):
                x = torch.linspace(-1, 1, size * 8).view(size, 8).requires_grad_()
                dynaxla.mark_bucketed(x, 0)
                one(x).sin().sum().backward()
                found.append([x.grad, *(p.grad for p in model.parameters())])
                model.zero_grad()
            for actual, expected in zip(*found, strict=True):
                assert_close(actual, expected)


def test_a_region_with_an_op_that_cannot_be_compiled_is_cut_there(recorder: Recorder) -> None:
    @torch.compiler.nested_compile_region
    def part(x: Tensor) -> Tensor:
        return eager_only(x.sin()).cos()

    def model(x: Tensor) -> Tensor:
        return part(part(x))

    with recorder.expect(compiles=3, eager_ops=2), torch.no_grad():
        assert_same(model, compile_(model), torch.randn(4))


def test_a_region_holds_a_branch(recorder: Recorder) -> None:
    @torch.compiler.nested_compile_region
    def part(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x - 5, lambda x: x + 6, (x,))

    def model(x: Tensor) -> Any:
        return part(part(x) * 2)

    for dynamic in (False, True):
        torch._dynamo.reset()
        with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
            compiled = compile_(model, dynamic)
            for sign in (1, -1):
                assert_same(model, compiled, sign * torch.ones(4))


def test_lowered_functions_go_with_their_rule() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    for each in graph.nodes:
        each.meta["val"] = torch.ones(3)
    call, _ = op_call(node)
    store = FunctionTable()
    finisher = FunctionFinisher(stablehlo_module.load(), "cpu", None)
    body = lambda x: jnp.sin(x)  # noqa: E731 - it has to be let go of
    (store.functions_of(body)["cpu", None, call.key],) = lower_bodies([(body, call)], finisher)
    assert len(store.names) == 1
    del body
    gc.collect()
    assert store.names == []


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_through_checkpoints(recorder: Recorder, nested: bool) -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = call_layer(layer, torch.tanh(x @ w)) if nested else torch.tanh(x @ w).sin()
        return y

    def model(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(block, x, w, use_reentrant=False)
        return x

    layer = Layer().requires_grad_(False)
    with recorder.expect(compiles=2, eager_ops=0):
        assert_same_gradients(model, torch.randn(3, 8), torch.randn(8, 8))


@pytest.mark.parametrize("nested", [False, True])
def test_autocast(recorder: Recorder, nested: bool) -> None:
    model = Stack(2) if nested else Layer()

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = model(x)
            return y @ y.mT

    with recorder.expect(compiles=1, eager_ops=0), torch.no_grad():
        result = compile_(cast, fold_parameters=False)(torch.ones(3, 8))
    assert result.dtype == torch.bfloat16
    with torch.no_grad():
        assert_close(result, cast(torch.ones(3, 8)))


@needs_libtpu
def test_control_flow_compiles_for_a_tpu() -> None:
    def model(x: Tensor, w: Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda x, w: (x @ w).sin(), lambda x, w: (x @ w).cos(), (x, w))
        z = while_loop(lambda i, y: (i < 5) & (y.sum() < 9), lambda i, y: (i + 1, y * 1.1), (torch.tensor(0), y))[1]
        return scan(lambda c, row: (torch.tanh(c + row), c * 2), torch.zeros(64), z)

    args = torch.randn(64, 64), torch.randn(64, 64)
    reports = dynaxla.compile_for_target(model, args, target=TARGET, options={"fallback": "error"})
    assert all(report.fits for report in reports)
    assert reports
