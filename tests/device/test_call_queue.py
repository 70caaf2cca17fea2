"""Calls of ops whose programs XLA still compiles: they wait, and run in the program's order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.device import call_queue
from dynaxla.device.call_queue import WaitingCall
from dynaxla.device.lazy_buffer import LazyBuffer
from dynaxla.device.registration import device_in_use
from dynaxla.device.storage import storage_of
from dynaxla.errors import CompileError, ExecutionError
from dynaxla.observe.recorder import Recorder
from dynaxla.pipeline import Pipeline
from tests.cache.forking import forked, status_of
from tests.interrupts import interrupts_behind_donating_runs
from tests.tolerances import assert_close

DEVICE = "dynaxla"


class Compiler:
    """XLA's compiler, which may be held up, or refuse everything."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.refuses = False

    def run(self, make: Callable[[], Any]) -> Any:
        assert self.goes_on.wait(60)
        if self.refuses:
            raise CompileError("refused", cause="the test", hint="none")
        return make()


@pytest.fixture
def compiler(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    held, lower_first = Compiler(), Pipeline.lower_first

    def lower(self: Pipeline, *given: Any) -> Any:
        made = lower_first(self, *given)
        return partial(held.run, made) if isinstance(made, partial) else made

    monkeypatch.setattr(Pipeline, "lower_first", lower)
    yield held
    held.goes_on.set()
    device_in_use().eager.force()
    assert not device_in_use().eager.queue.calls


def is_waiting(x: Tensor) -> bool:
    held: Any = storage_of(x).held
    return isinstance(held, LazyBuffer) and isinstance(held.trace, WaitingCall)


def test_python_goes_on_while_xla_compiles(compiler: Compiler, recorder: Recorder) -> None:
    x = torch.randn(3, 1009)
    mine = x.to(DEVICE)
    once = mine.sin()
    twice = once.cos()
    assert is_waiting(once)
    assert is_waiting(twice)
    compiler.goes_on.set()
    with recorder.expect(compiles=0):  # a reading of counts waits for the compiler
        assert_close(twice.cpu(), x.sin().cos())
    assert not is_waiting(once)
    again = mine.sin()
    assert not is_waiting(again)
    assert_close(again.cpu(), once.cpu())


def test_programs_that_are_there_wait_for_the_calls_before_them(compiler: Compiler) -> None:
    compiler.goes_on.set()
    x = torch.randn(1013)
    mine = x.to(DEVICE)
    (mine + 1).cpu()
    compiler.goes_on.clear()
    mine.mul_(3).tanh_()
    after = mine + 1
    assert is_waiting(after)
    compiler.goes_on.set()
    assert_close(after.cpu(), (x * 3).tanh() + 1)


def test_an_interrupt_behind_a_waiting_call_loses_no_tensor(compiler: Compiler) -> None:
    x = torch.randn(64, 1019)
    mine = x.to(DEVICE)
    mine.mul_(3)
    assert is_waiting(mine)
    compiler.goes_on.set()
    with interrupts_behind_donating_runs() as interrupted, pytest.raises(KeyboardInterrupt):
        mine.cpu()
    assert len(interrupted) == 1
    assert_close(mine.cpu(), x * 3)


def test_what_a_call_waits_to_read_is_not_written(compiler: Compiler) -> None:
    compiler.goes_on.set()
    x = torch.randn(64, 1061)
    mine = x.to(DEVICE)
    mine.mul_(3).mul_(3).cpu()
    compiler.goes_on.clear()
    before = mine.cosh()
    mine.mul_(3)
    compiler.goes_on.set()
    assert_close(before.cpu(), (x * 9).cosh())
    assert_close(mine.cpu(), x * 27)


def _change(x: Tensor, kept: list[Tensor], rng: random.Random) -> Tensor:
    """One step of a program that reads and writes one memory."""
    number = rng.choice([0.5, 1.5])
    step: Callable[[], Any] = rng.choice(
        [
            lambda: x.mul_(number),
            lambda: x[1:].add_(x[:-1].clone(), alpha=number),
            lambda: x.t()[2].copy_(x[:, 0]),
            lambda: kept.append(x.clone()),
            lambda: kept.append(x.detach()[1:]),
            lambda: kept.append(x.softmax(1)),
            lambda: kept[-1].sub_(number),
            lambda: x.clamp_(max=number),
            lambda: x.copy_(kept[-1].sum().expand_as(x)),
        ]
    )
    step()
    return x


@pytest.mark.parametrize("seed", range(6))
def test_writes_and_reads_keep_their_order(seed: int, compiler: Compiler) -> None:
    x = torch.randn(5, 7 + seed)
    ways = []
    for device in ("cpu", DEVICE):
        rng, mine = random.Random(seed), x.to(device).clone()
        kept = [mine * 2]
        for step in range(40):
            mine = _change(mine, kept, rng)
            if device == DEVICE and step % 13 == 12:
                compiler.goes_on.set()
                if seed % 2:
                    mine.sum().item()
                compiler.goes_on.clear()
        compiler.goes_on.set()
        ways.append([mine.cpu(), *(each.cpu() for each in kept)])
        compiler.goes_on.clear()
    for expected, found in zip(*ways, strict=True):
        assert_close(found, expected)


def test_a_backward_pass(compiler: Compiler) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(11, 23), nn.GELU(), nn.LayerNorm(23), nn.Linear(23, 3)), torch.randn(6, 11)
    expected = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    mine = net.to(DEVICE)
    loss = mine(x.to(DEVICE)).square().mean()
    found = torch.autograd.grad(loss, list(mine.parameters()))
    assert is_waiting(found[0])
    compiler.goes_on.set()
    for its, each in zip(expected, found, strict=True):
        assert_close(each.cpu(), its)


def test_a_program_that_xla_refuses_runs_on_the_host(compiler: Compiler) -> None:
    compiler.refuses = True
    x = torch.randn(2, 1019)
    before = dynaxla.read_metrics()
    found = x.to(DEVICE).erfc()
    compiler.goes_on.set()
    assert_close(found.cpu(), x.erfc())
    after = dynaxla.read_metrics()
    assert sum(after.host_ops.values()) == sum(before.host_ops.values()) + 1
    (reason,) = after.fallbacks[len(before.fallbacks) :]
    assert "aten.erfc" in reason
    assert "compile_failed" in reason


def test_a_call_that_fails_is_told_where_its_result_is_read(compiler: Compiler) -> None:
    x = torch.ones(1021, device=DEVICE)
    lost: Any = storage_of(x).buffer
    made = x.sinh() * 2
    lost.delete()
    compiler.goes_on.set()
    for _ in range(2):
        with pytest.raises(ExecutionError):
            made.cpu()
    assert (torch.ones(1021, device=DEVICE) * 2).sum().item() == 2042


def test_what_nothing_reads_is_not_run(compiler: Compiler) -> None:
    x = torch.ones(1031, device=DEVICE)
    lost: Any = storage_of(x).buffer
    x.asinh()
    lost.delete()  # its run would fail
    compiler.goes_on.set()
    dynaxla.read_metrics()
    torch.dynaxla.synchronize()  # type: ignore[attr-defined]


def test_calls_that_wait_are_bounded(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "MOST_WAITING", 8)
    x = torch.ones(1033, device=DEVICE)
    timer = threading.Timer(0.2, compiler.goes_on.set)
    timer.start()
    for _ in range(50):
        x = x * 1.5 - 0.5
    assert len(device_in_use().eager.queue.calls) <= 9
    assert x.sum().item() == 1033
    timer.join()


def test_threads_see_their_own_writes(compiler: Compiler) -> None:
    found: dict[int, float] = {}

    def work(number: int) -> None:
        x = torch.full((number + 2, 1039), 1.0, device=DEVICE)
        for _ in range(5):
            x.mul_(2).add_(number)
        found[number] = x[0, 0].item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    compiler.goes_on.set()
    for thread in threads:
        thread.join(60)
    assert found == {number: 32 + 31 * number for number in range(4)}


def test_a_forked_child_reads_counts_while_the_parent_compiles(compiler: Compiler) -> None:
    torch.ones(1049, device=DEVICE).acosh()
    assert status_of(forked(dynaxla.read_metrics)) == 0
