"""`options={"verify": f}` compares calls with eager: it finds wrong kernels and wrong passes, and nothing else."""

from __future__ import annotations

import itertools
import logging
import re
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

import dynaxla
from dynaxla import graph_builder
from dynaxla.errors import DivergenceError, OptionError
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Options
from dynaxla.passes.manager import CapturedGraph, GraphFunction, Pass, PassContext
from dynaxla.passes.pass_order import FOR_PARTS
from dynaxla.runtime_state import process
from dynaxla.verify import divergence
from dynaxla.verify.checked_graph import GraphChecker, is_due
from tests.async_compile.ended import until
from tests.tolerances import assert_close

aten = torch.ops.aten
_numbers = itertools.count()


def verified(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Any:
    options = {"verify": 1.0, "verify_action": "raise", **options}
    return torch.compile(function, backend="dynaxla", dynamic=dynamic, options=options)


@pytest.fixture
def wrong_op() -> Any:
    """An operator, x -> tanh(x), whose lowering is off by a hundredth."""
    op = torch.library.custom_op(
        f"verify_tests::op_{next(_numbers)}", lambda x: torch.tanh(x), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(lambda x: torch.empty_like(x))
    dynaxla.register_lowering(op._opoverload, lambda x: jnp.tanh(x) * 1.01)
    return op


def subtracts(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    """Deliberately wrong."""
    for node in graph.module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        node.target = aten.sub.Tensor
    return graph


@pytest.fixture
def wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = (*FOR_PARTS[:5], Pass("subtracts", subtracts, "Deliberately wrong."), *FOR_PARTS[5:])
    for module in (graph_builder, divergence):
        monkeypatch.setattr(module, "FOR_PARTS", passes)


@torch.no_grad()
def test_a_wrong_kernel_is_named_with_its_line(
    wrong_op: Any, recorder: Recorder, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x) @ w
        z = wrong_op(y)  # here
        return (z * 2).sum(-1), y

    compiled = verified(model, verify_action="warn")
    with caplog.at_level(logging.WARNING, "dynaxla"), recorder.expect(verified_calls=2, diverged_calls=2):
        for _ in range(2):
            compiled(torch.randn(4, 5), torch.randn(5, 5))
    (told,) = [r.getMessage() for r in caplog.records if "is not eager's" in r.getMessage()]
    assert recorder.snapshot().divergences[-1] == told
    assert "inference graph, call 1: result 0" in told
    assert re.search(r"off by \d\.\d+e-0\d, 1\.0e-02 of the largest magnitude, tolerance 0\.0001", told)
    assert f"the first op that diverges: {wrong_op._opoverload} at {__file__}" in told
    assert "z = wrong_op(y)  # here" in told
    assert "made so by: lowering or XLA" in told
    runpy.run_path(told.rpartition("repro: ")[2], run_name="__main__")
    table = capsys.readouterr().out
    assert "NO" in table
    assert "off by" in table


@torch.no_grad()
def test_a_wrong_pass_is_named(wrong_pass: None) -> None:
    compiled = verified(lambda x, w: torch.sin(x) @ w.t() * x + 1)
    with pytest.raises(DivergenceError, match="made so by: subtracts") as caught:
        compiled(torch.randn(3, 3), torch.randn(3, 3))
    assert "the first op that diverges: aten.mul.Tensor at" in str(caught.value)
    assert caught.value.frame is not None


def test_a_wrong_kernel_in_the_backward_alone(wrong_op: Any) -> None:
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return wrong_op(x) * gradient

    x = torch.randn(3, 4, requires_grad=True)
    result = verified(lambda x: Squared.apply(x).sum())(x)
    assert_close(result.detach(), x.detach().square().sum())
    with pytest.raises(DivergenceError, match="backward graph, call 1") as caught:
        result.backward()
    assert f"the first op that diverges: {wrong_op._opoverload}" in str(caught.value)


@torch.no_grad()
def test_a_wrong_kernel_in_a_bucket(wrong_op: Any, recorder: Recorder) -> None:
    compiled = verified(lambda x: x.cos().cumsum(0) + 1, dynamic=True)
    with recorder.expect(compiles=1, diverged_calls=0, verified_calls=2):
        for rows in (5, 7):
            x = torch.randn(rows, 3)
            assert_close(compiled(x), x.cos().cumsum(0) + 1)
    wrong = verified(lambda x: wrong_op(x.cos()) + 1, dynamic=True)
    with pytest.raises(DivergenceError, match=str(wrong_op._opoverload)):
        wrong(torch.randn(5, 3))


class Trained(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.GELU(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).softmax(-1)  # type: ignore[no-any-return]


def test_training_with_random_draws_is_the_same(recorder: Recorder) -> None:
    """Forward and backward, running statistics that are written to, and the same draws in eager."""
    model = Trained()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = verified(model, dynamic=True)
    with recorder.expect(verified_calls=6, diverged_calls=0):
        for rows in (5, 7, 6):
            compiled(torch.randn(rows, 6)).square().sum().backward()
            optimizer.step()


def test_verifying_draws_no_other_numbers() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True) + torch.rand_like(x)

    x, results = torch.randn(20, 20), []
    for options in ({"verify": 1.0}, {}):
        torch.manual_seed(3)
        torch._dynamo.reset()
        compiled = verified(model, **options) if options else torch.compile(model, backend="dynaxla")
        results.append([compiled(x) for _ in range(2)])
    for with_verify, without in zip(*results, strict=True):
        assert torch.equal(with_verify, without)


def cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # type: ignore[no-any-return]


def write_rows(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    cache[:, at] = rows
    return cache.sum(1)


SAME: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "control flow": (cond, lambda: (torch.randn(4),), {}),
    "writes in place": (
        write_rows,
        lambda: (torch.zeros(2, 1024, 128), torch.ones(2, 1, 128), torch.tensor([3])),
        {},
    ),
    "a written input": (lambda x: (x.mul_(2), x.t()), lambda: (torch.randn(3, 4),), {}),
    "views of results": (lambda x: (lambda y: (y, y[1:], y.t()))(x.sin()), lambda: (torch.randn(3, 4),), {}),
    "expanded and strided inputs": (
        lambda x, y: x * 2 + y,
        lambda: (torch.randn(4, 1).expand(4, 5), torch.randn(8, 10)[::2, ::2]),
        {},
    ),
    "overlapping inputs": (lambda x: x * 2, lambda: (torch.randn(6).unfold(0, 3, 1),), {}),
    "ops of eager": (lambda x: torch.nonzero(x).sum() + x.sum(), lambda: (torch.tensor([0.0, 3.0]),), {}),
    "draws of eager": (lambda x: torch.dropout(x, 0.5, True), lambda: (torch.randn(9),), {"rng": "eager"}),
    "a constant": (lambda x: x + torch.tensor([1.0, 2.0]), lambda: (torch.randn(2),), {}),
    "numbers and half": (lambda x, n: (x * n).half().sum(), lambda: (torch.randn(3), 4), {}),
    "in the background": (lambda x: x.sin() * 2, lambda: (torch.randn(3),), {"compile": "behind"}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", SAME)
def test_what_is_right_is_found_right(name: str, recorder: Recorder) -> None:
    function, make, options = SAME[name]
    compiled = verified(function, **options)
    before = recorder.snapshot()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), recorder.expect(diverged_calls=0):
        for _ in range(2):
            compiled(*make())
    until(lambda: process().compile_service.idle)
    after = recorder.snapshot()
    assert after.verified_calls - before.verified_calls >= 2
    assert after.unverified == before.unverified


@torch.no_grad()
def test_the_shape_of_a_view_that_torch_makes_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = GraphChecker.wrap

    def wrap_wrong(checker: GraphChecker, function: GraphFunction) -> GraphFunction:
        def run(args: list[Any]) -> list[Any]:
            results = list(function(args))
            assert checker.graph.inputs is not None
            (place,) = checker.graph.inputs.unread
            results[place] = torch.zeros(2, 6)
            return results

        return wrap(checker, run)

    monkeypatch.setattr(GraphChecker, "wrap", wrap_wrong)
    with pytest.raises(DivergenceError, match=r"shape \(2, 6\), expected \(4, 3\)"):
        verified(lambda x: (x.mul_(2), x.t())[1])(torch.randn(3, 4))


@torch.no_grad()
def test_an_error_of_eagers_is_a_difference() -> None:
    compiled = verified(lambda x, i: x[i] + 1, value_checks=False)
    with pytest.raises(DivergenceError, match="eager raises IndexError"):
        compiled(torch.randn(3), torch.tensor([7]))


@torch.no_grad()
def test_collectives_do_not_happen_twice(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with caplog.at_level(logging.WARNING, "dynaxla"), recorder.expect(verified_calls=0):
            verified(lambda x: all_reduce(x * 2, "sum", dist.group.WORLD) + 1)(torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert any("are not verified: _c10d_functional" in r.getMessage() for r in caplog.records)
    assert "_c10d_functional" in recorder.snapshot().unverified[-1]


@torch.no_grad()
def test_what_numbers_that_cancel_leave_is_no_difference(recorder: Recorder) -> None:
    """The gradient of a bias in front of a batch norm is 0; computed, it is what roundings leave, in any order of them."""
    x = torch.randn(1000)
    with recorder.expect(verified_calls=1, diverged_calls=0):
        verified(lambda x: (x - x.mean()).sum() * 1000)(x)


@pytest.mark.parametrize(
    ("fraction", "due"),
    [(1.0, list(range(12))), (0.5, [0, 2, 4, 6, 8, 10]), (0.25, [0, 4, 8]), (0.01, [0]), (0.3, [0, 4, 7, 10])],
)
def test_the_fraction_is_even_and_takes_the_first_call(fraction: float, due: list[int]) -> None:
    assert [call for call in range(12) if is_due(call, fraction)] == due


def test_the_fraction_holds_for_many_calls() -> None:
    for fraction in (0.01, 0.07, 0.9):
        assert sum(is_due(call, fraction) for call in range(10_000)) == pytest.approx(10_000 * fraction, abs=1.5)


@torch.no_grad()
def test_some_calls_are_compared_and_from_several_threads(recorder: Recorder) -> None:
    compiled, x = verified(lambda x: x.sin(), verify=0.1), torch.randn(3)
    compiled(x)
    with recorder.expect(verified_calls=4, diverged_calls=0):
        threads = [threading.Thread(target=torch.no_grad()(lambda: [compiled(x) for _ in range(10)])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@torch.no_grad()
def test_nothing_is_in_the_way_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen when a graph is built: no call asks."""
    monkeypatch.setattr(graph_builder, "build_checked", None)
    x = torch.randn(3)
    assert_close(torch.compile(lambda x: x.sin(), backend="dynaxla")(x), x.sin())


@torch.no_grad()
def test_a_stored_capture_is_verified_too(recorder: Recorder) -> None:
    """By AOTAutograd's cache of this process: the graph that it gives is compared as well."""
    x = torch.randn(4)
    for _ in range(2):
        torch._dynamo.reset()
        with recorder.expect(verified_calls=1):
            verified(lambda x: x.sin() + 1, captures=True)(x)


def shift(x: Tensor) -> Tensor:
    return x.cos() + 1


@torch.no_grad()
def test_a_packaged_function_is_verified_where_it_is_loaded(recorder: Recorder, tmp_path: Path) -> None:
    """Not where it is made, whose calls are on zeros."""
    path, x = str(tmp_path / "package"), torch.randn(4)
    compiled = torch.compile(shift, backend="dynaxla", fullgraph=True, options={"verify": 1.0})
    with recorder.expect(verified_calls=0):
        compiled.aot_compile(((x,), {})).save_compiled_function(path)
    with open(path, "rb") as file, recorder.expect(verified_calls=2, diverged_calls=0, compiles=0):
        loaded = torch.compiler.load_compiled_function(file)
        for _ in range(2):
            assert_close(loaded(x), shift(x))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_fraction_is_from_0_to_1(value: float) -> None:
    with pytest.raises(OptionError, match="is no fraction of calls"):
        Options.from_mapping({"verify": value}, {})


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(OptionError, match="compiles nothing that verify could compare"):
        Options.from_mapping({"verify": 0.5, "executor": "eager"}, {})
    with pytest.raises(OptionError, match="did you mean 'raise'"):
        Options.from_mapping({"verify": 0.5, "verify_action": "raises"}, {})
