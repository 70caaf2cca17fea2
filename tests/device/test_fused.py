"""The fused mode: ops are collected until a value is read, with eager's numbers."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dynaxla
from dynaxla.device import op_programs
from dynaxla.device.lazy_buffer import LazyBuffer
from dynaxla.device.lazy_graph import LazyTrace
from dynaxla.device.registration import device_in_use
from dynaxla.device.storage import storage_of
from dynaxla.errors import CompileError, ExecutionError, OptionError
from dynaxla.observe.recorder import Recorder
from tests.device.test_donation import decode
from tests.device.test_views import _views, _write
from tests.tolerances import assert_close

DEVICE = "dynaxla"


@pytest.fixture(autouse=True)
def _fused(device: torch.device) -> Iterator[None]:
    torch.manual_seed(0)
    with dynaxla.device_mode("fused"):
        yield
    assert not device_in_use().eager.fused._trace.steps


def is_pending(x: Tensor) -> bool:
    held: Any = storage_of(x).held
    return isinstance(held, LazyBuffer) and isinstance(held.trace, LazyTrace)


def _op(x: Tensor, other: Tensor, rng: random.Random) -> Tensor:
    number = rng.choice([0.5, 1.5, 2])
    return rng.choice(
        [
            lambda: x * number,
            lambda: torch.add(x, x.sum(), alpha=number),
            lambda: x.clone(),
            lambda: x.clamp(max=number),
            lambda: torch.where(x > number, x, x.detach().clone()),
            lambda: x + other.sum(),
            lambda: torch.cat([x, x], 0)[: len(x)] if x.dim() else x,
            lambda: x.softmax(0) if x.dim() else x.tanh(),
            lambda: torch.full_like(x, number),
            lambda: x.new_zeros(x.shape),
        ]
    )()


@given(st.data())
def test_chains_of_views_writes_and_ops(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    here = torch.arange(1, 1 + torch.Size(sizes).numel(), dtype=torch.float32).view(sizes)
    pairs = [(here, here.to(DEVICE))]
    for _ in range(data.draw(st.integers(1, 8))):
        mine, other = data.draw(st.sampled_from(pairs))
        kind = data.draw(st.sampled_from(["view", "write", "op", "drop"]))
        if kind == "view":
            step = _views(mine, data)
            assert step is not None
            pairs.append((step(mine), step(other)))
        elif kind == "drop" and len(pairs) > 1:
            del pairs[data.draw(st.integers(0, len(pairs) - 1))]
        elif mine.dtype is not torch.float32:
            continue
        elif kind == "write":
            write = _write(mine, data)
            write(mine)
            write(other)
        else:
            seed, by = data.draw(st.integers(0, 1 << 16)), data.draw(st.integers(0, len(pairs) - 1))
            if pairs[by][0].dtype is torch.float32:
                drawn = [_op(x, pairs[by][i], random.Random(seed)) for i, x in enumerate((mine, other))]
                pairs.append((drawn[0], drawn[1]))
    for expected, actual in data.draw(st.permutations(pairs)):
        assert expected.stride() == actual.stride()
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_ops_run_together_when_a_value_is_read(recorder: Recorder) -> None:
    x = torch.arange(6.0).view(2, 3).to(DEVICE)
    with recorder.expect(compiles=0, traces=0):
        y = (x * 2 + 1).relu()
        y[1].mul_(10)
        dead = y.exp()
        del dead
        z = y.sum()
    assert is_pending(y)
    assert is_pending(z)
    with recorder.expect(compiles=1, traces=1):
        assert z.item() == 9 + 10 * 27
        assert y.tolist() == [[1, 3, 5], [70, 90, 110]]


def test_numbers_and_places_are_inputs(recorder: Recorder) -> None:
    x = torch.arange(12.0).view(4, 3).to(DEVICE)

    def step(row: int, number: float) -> float:
        return (x[row] * number + torch.full((3,), number / 4, device=DEVICE)).sum().item()

    step(0, 0.25)
    with recorder.expect(compiles=0, traces=4):
        for row, number in ((1, 0.5), (2, 0.25), (3, 1.0), (0, 4.0)):
            expected = sum(3 * row + i for i in range(3)) * number + 3 * number / 4
            assert step(row, number) == pytest.approx(expected)


def _train(model: nn.Module, x: Tensor, steps: int) -> Iterator[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def test_training_with_a_schedule_compiles_nothing_in_steady_state(recorder: Recorder) -> None:
    mine = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    there, x = copy.deepcopy(mine).to(DEVICE), torch.randn(5, 8)
    steps = zip(_train(mine, x, 8), _train(there, x.to(DEVICE), 8), strict=True)
    for _ in range(3):
        expected, actual = next(steps)
        assert actual == pytest.approx(expected, rel=1e-4)
    with recorder.expect(compiles=0, traces_apart=0):
        for expected, actual in steps:
            assert actual == pytest.approx(expected, rel=1e-4)
    for one, other in zip(mine.parameters(), there.parameters(), strict=True):
        assert_close(other.cpu(), one)


def test_draws_are_those_of_the_eager_mode() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(7)
        torch.randn(3, device=DEVICE)  # is dropped, and draws all the same
        x = torch.randn(4, 3, device=DEVICE)
        y = torch.nn.functional.dropout(torch.ones(50, device=DEVICE), 0.5)
        z = torch.empty(5, device=DEVICE).uniform_(generator=torch.Generator().manual_seed(3))
        return [z.cpu(), x.cpu(), y.cpu(), torch.randperm(9, device=DEVICE).cpu()]

    fused = draw()
    with dynaxla.device_mode("eager"):
        eager = draw()
    for one, other in zip(fused, eager, strict=True):
        assert_close(one, other)
    assert torch.equal(fused[2], eager[2])
    assert torch.equal(fused[3], eager[3])


def test_clones_and_copies_are_told_apart() -> None:
    x = torch.ones(3, device=DEVICE) + 1
    y, z = x.clone(), torch.empty_like(x).copy_(x)
    x.add_(1)
    y.mul_(5)
    assert (x.tolist(), y.tolist(), z.tolist()) == ([3] * 3, [10] * 3, [2] * 3)


def test_ops_on_the_host_and_control_flow(recorder: Recorder) -> None:
    x = torch.tensor([0.0, 3.0, 0.0, 4.0]).to(DEVICE)
    y = x * 2
    assert y.nonzero().tolist() == [[1], [3]]
    assert y[y > 6].tolist() == [8]
    y.add_(1)
    assert bool((y == 1).any())
    assert "7." in str(y)
    before = dict(dynaxla.read_metrics().host_ops)
    assert before["aten.nonzero.default"] > 0


def test_errors_are_raised_at_the_call() -> None:
    x = torch.ones(2, 3, device=DEVICE) + 1
    with pytest.raises(RuntimeError, match="shape"):
        x @ x
    with pytest.raises(RuntimeError):
        x + torch.ones(4, device=DEVICE)
    assert x.sum().item() == 12


def _fail_in_the_mode(made: list[Tensor]) -> None:
    with dynaxla.device_mode("fused"):
        made.append(torch.ones(2, device=DEVICE) + 1)
        assert is_pending(made[0])
        raise KeyError


def test_a_mode_ends_with_nothing_pending() -> None:
    with pytest.raises(OptionError, match="device mode") as caught:
        dynaxla.device_mode("fuse")
    assert "fused" in str(caught.value.hint)
    with dynaxla.device_mode("eager"):
        assert not is_pending(torch.ones(2, device=DEVICE) + 1)
        made: list[Tensor] = []
        with pytest.raises(KeyError):
            _fail_in_the_mode(made)
        (x,) = made
        assert not is_pending(x)
        assert not is_pending(x + 1)
    assert is_pending(x + 1)
    y = x + 1
    torch.dynaxla.synchronize()  # type: ignore[attr-defined]
    assert not is_pending(y)
    assert y.tolist() == [3, 3]


def test_collected_ops_are_bounded(recorder: Recorder) -> None:
    x = torch.zeros(2, device=DEVICE)
    for _ in range(600):
        x = x + 1
    assert dynaxla.read_metrics().traces >= 2
    assert x.tolist() == [600, 600]


def test_deepcopies_and_pickles() -> None:
    model = nn.Linear(3, 2).to(DEVICE)
    with torch.no_grad():
        model.weight.mul_(2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.zero_()
    assert other.weight.abs().sum().item() > 0
    assert model.weight.abs().sum().item() == 0


@torch.no_grad()
def test_compiled_graphs_take_what_is_pending_and_see_writes() -> None:
    torch._dynamo.reset()
    model = nn.Linear(3, 2)
    there, x = copy.deepcopy(model).to(DEVICE), torch.randn(4, 3)
    compiled: Any = torch.compile(there, backend="dynaxla")
    for number in range(3):
        model.weight.add_(number)
        there.weight.add_(number)
        assert_close((compiled(x.to(DEVICE) * 2) + 1).cpu(), model(x * 2) + 1)


@torch.no_grad()
def test_what_a_graph_takes_was_read_before() -> None:
    torch._dynamo.reset()
    run: Any = torch.compile(decode, backend="dynaxla", dynamic=False)
    cache = torch.randn(2, 64, 16)
    mine = cache.to(DEVICE) + 0
    for step in range(4):
        new, position = torch.randn(2, 1, 16), torch.tensor([step])
        old = mine * 2  # reads the memory that the graph takes
        view = mine[:, step]
        expected = cache * 2
        found = run(mine, new.to(DEVICE), position.to(DEVICE))
        assert_close(found.cpu(), decode(cache, new, position))
        assert_close(old.cpu(), expected)
        assert_close((view + 1).cpu(), cache[:, step] + 1)
        mine.mul_(2)
        cache.mul_(2)
    with dynaxla.device_mode("eager"):
        kept = mine.clone()
        mine.add_(1)
        assert_close(mine.cpu() - 1, kept.cpu())


def test_what_does_not_compile_runs_op_by_op(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    compile_ = op_programs.OpProgramBuilder.compile

    def failing(self: Any, graph: Any, traced: Any, what: str) -> Any:
        if what.endswith("ops") or "sinh" in what:
            raise CompileError("no", "")
        return compile_(self, graph, traced, what)

    monkeypatch.setattr(op_programs.OpProgramBuilder, "compile", failing)
    x = torch.arange(7.0)
    y = (x.to(DEVICE) + 0.5)[2:].sinh()
    with recorder.expect(traces_apart=1):
        assert_close((y * 3).cpu(), (x + 0.5)[2:].sinh() * 3)
        assert_close(y.cpu(), (x + 0.5)[2:].sinh())


def failure(x: torch.Tensor) -> str:
    """What is raised where a tensor is read."""
    try:
        x.tolist()
    except ExecutionError as error:
        return str(error)
    return ""


def test_a_failed_run_names_the_op_and_the_line() -> None:
    x = torch.ones(3).to(DEVICE) + 1
    x.tolist()
    buffer: Any = storage_of(x).buffer
    y = x * 3
    buffer.delete()
    for _ in range(2):
        assert "aten.mul.Tensor at " in failure(y)
        assert "test_fused" in failure(y)
    held = ref(storage_of(y))
    del y
    assert held() is None  # the error that is kept holds no frames, which hold the tensor


def test_readers_of_one_trace() -> None:
    """All threads read results of the same trace at once, while its program is made, and again when it is there."""
    for number in range(1, 4):
        x = torch.ones(number, device=DEVICE) * 2
        results = [x + step for step in range(8)]
        found: list[Any] = [None] * 8

        def read(step: int, results: list[Tensor] = results, found: list[Any] = found) -> None:
            found[step] = results[step].tolist()

        threads = [threading.Thread(target=read, args=(step,)) for step in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert found == [[2 + step] * number for step in range(8)]


def test_the_precision_of_products_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, seen = op_programs.OpProgramBuilder.compile, []

    def noting(self: Any, graph: Any, traced: Any, what: str) -> Any:
        seen.append(traced.precision)
        return compile_(self, graph, traced, what)

    monkeypatch.setattr(op_programs.OpProgramBuilder, "compile", noting)
    x = torch.randn(3, 3)
    there, before = x.to(DEVICE), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        one = there @ there
        torch.set_float32_matmul_precision("highest")
        two = one @ there
        torch.set_float32_matmul_precision("medium")
        assert_close(two.cpu(), x @ x @ x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["high", "highest"]


def test_threads() -> None:
    shared = torch.ones(4, device=DEVICE) * 2
    failed: list[str] = []

    def work(number: int) -> None:
        for step in range(15):
            x = torch.full((4,), float(number), device=DEVICE) + shared
            x.mul_(step)
            if x.tolist() != [(number + 2) * step] * 4:
                failed.append(str((number, step)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)
