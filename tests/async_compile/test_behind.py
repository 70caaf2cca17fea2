"""Calls that run at once while children compile: right at every moment, and none is lost."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jax import numpy as jnp
from torch import nn

import dynaxla
from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.service import CompileService
from dynaxla.errors import OptionError
from dynaxla.isolation.children import ChildDied, ChildProcess
from dynaxla.observe.recorder import Recorder
from dynaxla.pipeline import Pipeline
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.runtime_state import process
from tests.async_compile.ended import jobs, until
from tests.interrupts import interrupt, interruptible
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("settled")
BEHIND = {"compile": "behind"}
BUCKETS = dynaxla.Explicit((4, 8, 16, 32))


class Net(nn.Module):
    """Attends over a length; what is made of its weights alone is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) @ (self.scale.sin() @ self.scale)
        return (x @ self.mix(x).mT).softmax(-1) @ x


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length))


def behind(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", dynamic=True, options={**BEHIND, "buckets": BUCKETS, **options})


@pytest.fixture
def nothing_is_made_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process nothing is padded, lowered or compiled."""
    with monkeypatch.context() as patch:
        for owner, name in ((PartGraphs, "pad"), (PartGraphs, "specialize"), (Pipeline, "compile")):
            patch.setattr(owner, name, _forbidden)
        yield


def _forbidden(*_: object, **__: object) -> None:
    raise AssertionError("it was done in the caller's process")


@torch.no_grad()
@pytest.mark.usefixtures("nothing_is_made_here")
def test_calls_run_at_once_and_only_loading_is_done_here(recorder: Recorder) -> None:
    net = Net()
    compiled = behind(net)
    with recorder.expect(served_eager=1, served_own=0, compiles=1, folds=1, jobs_done=1), jobs(1):
        x = ids(3, 7)
        assert_close(compiled(x), net(x))
    with recorder.expect(served_own=3, served_eager=0, served_larger=0, compiles=0):
        for size in (5, 6, 8):
            x = ids(4, size)
            assert_close(compiled(x), net(x))
    with recorder.expect(served_larger=1, served_own=0, compiles=1, jobs_done=1), jobs(1):
        x = ids(4, 4)  # half of the bucket (4, 8): where nothing is measured yet that serves
        net.mix.weight.mul_(2), net.scale.data.add_(1)
        assert_close(compiled(x), net(x))


@pytest.mark.usefixtures("nothing_is_made_here")
def test_training_goes_from_eager_to_programs(recorder: Recorder) -> None:
    torch.manual_seed(0)
    net = Net()
    compiled = behind(net)

    def step(function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        net.zero_grad()
        result = function(x)
        result.square().sum().backward()
        return [result.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]

    def check() -> None:
        x = ids(3, 7)
        for mine, eager in zip(step(compiled, x), step(net, x), strict=True):
            assert_close(mine, eager)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)

    with recorder.expect(served_eager=2, jobs_done=2), jobs(2):
        check()
    with recorder.expect(served_own=4, served_eager=0):
        check(), check()


@torch.no_grad()
def test_exact_shapes_and_graphs_without_sizes(recorder: Recorder) -> None:
    """What cannot be padded is found out by the child, and compiled exactly by another job."""
    compiled = behind(lambda x: torch.linalg.lu(x)[2].sin())
    x = torch.randn(9, 3)
    for _ in range(2):
        with jobs(1):
            assert_close(compiled(x), torch.linalg.lu(x)[2].sin())
    with recorder.expect(served_own=1):
        assert_close(compiled(x), torch.linalg.lu(x)[2].sin())
    static = torch.compile(torch.cos, backend="dynaxla", dynamic=False, options=BEHIND)
    with recorder.expect(served_eager=1, compiles=1), jobs(1):
        assert_close(static(x), x.cos())
    with recorder.expect(served_own=1):
        assert_close(static(x), x.cos())


def test_draws_are_the_same_wherever_they_run(recorder: Recorder) -> None:
    compiled = behind(lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x))
    x, results = torch.randn(7, 5), []
    with jobs(1):
        torch.manual_seed(3)
        results.append(compiled(x))
    with recorder.expect(served_own=1):
        torch.manual_seed(3)
        results.append(compiled(x))
    assert_close(*results)


@torch.no_grad()
def test_a_child_that_is_killed_loses_no_call(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    compiled = behind(net)
    with jobs(1):
        compiled(ids(3, 7))
    children = process().compile_service.children
    with recorder.expect(jobs_done=1, jobs_failed=0, compiles=1), jobs(1):
        x = ids(3, 12)
        assert_close(compiled(x), net(x))
        until(lambda: any(child.busy for child in children))
        for child in children:
            if child.busy and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
        for _ in range(20):
            assert_close(compiled(x), net(x))
    assert "ended by SIGKILL; its request is asked again" in caplog.text
    with recorder.expect(served_own=1):
        assert_close(compiled(x), net(x))


@torch.no_grad()
def test_without_threads_the_caller_waits(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dynaxla-compile":
            raise RuntimeError("can't start new thread")
        start(thread)

    compiled, x = behind(torch.sin), torch.randn(9)
    with monkeypatch.context() as short, recorder.expect(jobs_done=1, jobs_failed=0), jobs(1):
        short.setattr(threading.Thread, "start", refuse)
        assert_close(compiled(x), x.sin())
    with recorder.expect(served_own=1):
        assert_close(compiled(x), x.sin())


@torch.no_grad()
def test_an_interrupt_where_a_job_begins_leaves_its_child_at_work(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a child that was taken without a thread, whoever waits for the job would wait for ever."""
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        if thread.name == "dynaxla-compile":
            interrupt()
        start(thread)

    compiled, x = behind(torch.cos), torch.randn(9)
    with interruptible(), monkeypatch.context() as interrupted, recorder.expect(jobs_done=1, jobs_failed=0), jobs(1):
        interrupted.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
    until(lambda: process().compile_service.idle)
    with recorder.expect(served_own=1):
        assert_close(compiled(x), x.cos())


@torch.no_grad()
def test_a_child_that_always_dies_is_reported_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def dying(*_: object) -> object:
        asked.append(1)
        raise ChildDied(-9, "")

    monkeypatch.setattr(ChildProcess, "ask", dying)
    compiled = behind(torch.sin)
    x = torch.randn(7)
    with recorder.expect(jobs_failed=1, jobs_done=0), jobs(1):
        assert_close(compiled(x), x.sin())
    with recorder.expect(served_eager=5, jobs_failed=0):
        for _ in range(5):
            assert_close(compiled(x), x.sin())
    assert len(asked) == 2
    assert caplog.text.count("stay without a program of their own") == 1


@torch.no_grad()
def test_what_only_this_process_knows_is_compiled_here(recorder: Recorder) -> None:
    with torch.library._scoped_library("behind_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library._register_fake("twice", torch.empty_like)
        op = torch.ops.behind_tests.twice
        dynaxla.register_lowering(op.default, lambda x: x * jnp.asarray(2, x.dtype), pad_rule="elementwise")
        compiled = behind(lambda x: op(x).sin())
        x = torch.randn(7)
        with recorder.expect(jobs_done=1, jobs_here=1, compiles=1), jobs(1):
            assert_close(compiled(x), (x * 2).sin())
        with recorder.expect(served_own=1):
            assert_close(compiled(x), (x * 2).sin())
    assert "behind_tests.twice.default is known to this process alone" in recorder.snapshot().unshipped[-1]


@torch.no_grad()
def test_threads_call_while_children_compile(recorder: Recorder) -> None:
    net = Net()
    compiled = behind(net)
    wrong: list[object] = []

    @torch.no_grad()
    def call(seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        for _ in range(30):
            batch, length = torch.randint(2, 17, (2,), generator=chance).tolist()
            x = torch.randint(0, 50, (batch, length), generator=chance)
            try:
                assert_close(compiled(x), net(x))
            except BaseException as error:
                wrong.append(error)

    compiled(ids(3, 7))
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    with recorder.expect(jobs_failed=0):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_part_that_is_gone_is_not_compiled(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[CompileJob] = []
    with monkeypatch.context() as patch:
        patch.setattr(CompileService, "submit", lambda self, job: waiting.append(job))
        behind(torch.cos)(torch.randn(7))
    torch._dynamo.reset()
    gc.collect()
    with recorder.expect(jobs_dropped=1, compiles=0), jobs(1):
        process().compile_service.submit(waiting[0])


@torch.no_grad()
def test_warm_up_waits_for_the_children_or_not(recorder: Recorder) -> None:
    for wait in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: (x * 3).cumsum(0), backend="dynaxla", options=BEHIND)
        x = torch.randn(6)
        dynaxla.mark_bucketed(x, 0, policy=dynaxla.Multiples(8), min=2, max=24)
        with jobs(3):
            ready = dynaxla.warmup(compiled, (x,), progress=False, wait=wait)
        assert ready == 3 or not wait
        with recorder.expect(served_own=3, compiles=0):
            for size in (5, 12, 20):
                y = torch.randn(size)
                assert_close(compiled(y), (y * 3).cumsum(0))


def test_options_that_contradict_it() -> None:
    with pytest.raises(OptionError, match="contradict each other"):
        torch.compile(torch.sin, backend="dynaxla", options={**BEHIND, "bucketing": "require"})(torch.randn(3))
