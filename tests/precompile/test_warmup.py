"""Warm-up compiles what is declared, and a frozen function never waits for a compile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.async_compile.job_queue import CompileJob
from dynaxla.async_compile.protocol import CompileFailed, pack_answer
from dynaxla.async_compile.service import CompileService
from dynaxla.errors import FrozenError, OptionError
from dynaxla.isolation.children import ChildProcess
from dynaxla.observe.recorder import Recorder
from dynaxla.pipeline import Pipeline
from dynaxla.runtime_state import process
from tests.async_compile.ended import jobs
from tests.lists import quick
from tests.tolerances import assert_close

BATCHES, LENGTHS = dynaxla.Explicit((2, 4)), dynaxla.Explicit((8, 32))


class Net(nn.Module):
    """Attends over a length and, behind a graph break, pools over it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = (x @ self.mix(x).mT).softmax(-1) @ x
        torch._dynamo.graph_break()
        return x.mean(1)


def make_net() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    net = Net().eval()
    return net, torch.compile(net, backend="dynaxla")


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length))


def marked(batch: int, length: int, low: int | None = 1, high: int | None = 4) -> torch.Tensor:
    x = ids(batch, length)
    dynaxla.mark_bucketed(x, 0, policy=BATCHES, min=low, max=high)
    dynaxla.mark_bucketed(x, 1, policy=LENGTHS, min=1, max=32)
    return x


def scale_and_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).sum()


@pytest.fixture
def warm(recorder: Recorder) -> tuple[Callable[[torch.Tensor], torch.Tensor], Recorder]:
    """A compiled function whose sizes go to 8, 16 or 32, with a program for 8 alone."""
    compiled = torch.compile(scale_and_sum, backend="dynaxla")
    x = torch.randn(5)
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Explicit((8, 16, 32)))
    with recorder.expect(compiles=1):
        compiled(x)
    return compiled, recorder


@pytest.mark.parametrize("inference", quick([False, True], False))
def test_after_warm_up_no_size_in_the_range_compiles(inference: bool, recorder: Recorder) -> None:
    """Also where tensors are made outside of inference mode and used inside."""
    net, compiled = make_net()
    with torch.inference_mode(inference):
        example = marked(3, 9)
    with torch.inference_mode():
        compiles = dynaxla.warmup(compiled, (example,), progress=False)
    assert compiles <= 9 + 9 + 4, (
        "batches 1, 2 and 4 by lengths 1, 8 and 32, in two graphs; four static ones of the second"
    )
    dynaxla.freeze(compiled)
    with recorder.expect(graphs=0, compiles=0, misses=0):
        for batch in range(1, 5):
            for length in (1, 2, 7, 8, 9, 20, 32):
                with torch.inference_mode(inference):
                    x = ids(batch, length)
                with torch.inference_mode():
                    assert_close(compiled(x), net(x))


@torch.no_grad()
def test_keyword_arguments_grads_and_other_inputs(recorder: Recorder) -> None:
    def function(x: torch.Tensor, *, scale: torch.Tensor, names: dict[str, torch.Tensor]) -> torch.Tensor:
        return (x * scale + names["y"]).softmax(0)

    compiled = torch.compile(function, backend="dynaxla")
    x, y = torch.randn(6, 3), torch.randn(6, 3)
    for tensor in (x, y):
        dynaxla.mark_bucketed(tensor, 0, policy=dynaxla.Multiples(8), max=24)
    example = {"x": x, "scale": torch.randn(3), "names": {"y": y}}
    assert dynaxla.warmup(compiled, example, progress=False) == 3
    with recorder.expect(compiles=0):
        for size in (2, 8, 9, 23):
            given = {"x": torch.randn(size, 3), "scale": torch.randn(3), "names": {"y": torch.randn(size, 3)}}
            assert_close(compiled(**given), function(**given))


def test_a_size_that_turns_out_fixed_is_no_hindrance(recorder: Recorder) -> None:
    """With dynamic=True every size begins as a symbol; progress is told after every call."""
    net, told = nn.Linear(3, 5), list[tuple[int, int]]()
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    x = torch.randn(4, 3)
    dynaxla.mark_bucketed(x, 0, policy=LENGTHS, min=2, max=32)
    assert dynaxla.warmup(compiled, (x,), progress=lambda done, total: told.append((done, total))) == 2
    assert told == [(1, 2), (2, 2)]
    with recorder.expect(compiles=0):
        assert_close(compiled(x), net(x))


def test_an_example_without_ranges_is_called_as_it_is(recorder: Recorder) -> None:
    compiled = torch.compile(scale_and_sum, backend="dynaxla")
    assert dynaxla.warmup(compiled, (torch.randn(4),), progress=False) == 1
    with recorder.expect(compiles=0):
        compiled(torch.randn(4))


def test_warm_up_keeps_the_callers_modes() -> None:
    seen = set()

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return x * 2

    @torch.compile(backend="dynaxla")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.disable(function)(y)
        return y * 2

    x = torch.randn(6)
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Multiples(8), max=40)
    with torch.inference_mode(), torch.autocast("cpu"):
        dynaxla.warmup(compiled, (x,), progress=False, workers=2)
    assert seen == {(False, True, True)}


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(1, None, "has no end"), (4, 3, "no size lies between")],
)
def test_ranges_that_cannot_be_warmed_up(low: int, high: int | None, told: str) -> None:
    _, compiled = make_net()
    with pytest.raises(OptionError, match=told):
        dynaxla.warmup(compiled, (marked(3, 9, low, high),), progress=False)


def test_dims_of_one_size_need_one_range() -> None:
    compiled = torch.compile(scale_and_sum, backend="dynaxla")
    x = torch.randn(6, 6)
    dynaxla.mark_bucketed(x, 0, max=8)
    dynaxla.mark_bucketed(x, 1, max=16)
    with pytest.raises(OptionError, match="two dims of size 6 have different ranges"):
        dynaxla.warmup(compiled, (x,), progress=False)


def test_more_buckets_than_executables_are_kept() -> None:
    compiled = torch.compile(scale_and_sum, backend="dynaxla", options={"max_executables": 2})
    x = torch.randn(6)
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Multiples(8), max=32)
    with pytest.raises(OptionError, match="some dropped again"):
        dynaxla.warmup(compiled, (x,), progress=False)


@pytest.mark.parametrize("compiled", [scale_and_sum, 3, torch.compile(scale_and_sum, backend="eager")])
def test_what_is_not_compiled_by_this_package(compiled: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(OptionError, match="not compiled by dynaxla"):
        dynaxla.freeze(compiled)
    with pytest.raises(OptionError, match="not compiled by dynaxla"):
        dynaxla.warmup(compiled, (torch.randn(3),))


def test_an_unknown_word_for_a_miss() -> None:
    with pytest.raises(OptionError, match="on_miss='wait' is not known"):
        dynaxla.freeze(torch.compile(scale_and_sum, backend="dynaxla"), "wait")  # type: ignore[arg-type]


def test_a_miss_is_an_error(warm: tuple[Callable[[torch.Tensor], torch.Tensor], Recorder]) -> None:
    compiled, recorder = warm
    dynaxla.freeze(compiled)
    with recorder.expect(compiles=0, misses=1), pytest.raises(FrozenError, match=r"sizes \(16,\); there are: \(8,\)"):
        compiled(torch.randn(12))
    with pytest.raises(FrozenError, match="a new graph"):
        compiled(torch.randn(3, dtype=torch.float64))
    dynaxla.freeze(compiled, "compile")
    for dtype in (torch.float32, torch.float64):
        with recorder.expect(compiles=1):
            x = torch.randn(12, dtype=dtype)
            assert_close(compiled(x), scale_and_sum(x))


@pytest.mark.parametrize(("on_miss", "size"), [("eager", 12), ("next_bucket", 40)])
def test_a_miss_runs_in_eager(
    warm: tuple[Callable[[torch.Tensor], torch.Tensor], Recorder], on_miss: str, size: int
) -> None:
    compiled, recorder = warm
    dynaxla.freeze(compiled, on_miss)  # type: ignore[arg-type]
    inputs = torch.randn(size), torch.randn(size, dtype=torch.float64)
    with recorder.expect(compiles=0, misses=2):
        for x in inputs:
            assert_close(compiled(x), scale_and_sum(x))
    dynaxla.freeze(compiled, "compile")
    with recorder.expect(compiles=2, misses=0):
        for x in inputs:
            assert_close(compiled(x), scale_and_sum(x))


def test_a_miss_runs_in_a_larger_bucket(
    warm: tuple[Callable[[torch.Tensor], torch.Tensor], Recorder],
) -> None:
    compiled, recorder = warm
    compiled(torch.randn(32))
    dynaxla.freeze(compiled, "next_bucket")
    with recorder.expect(compiles=0, misses=1, served_larger=1, served_eager=0):
        x = torch.randn(12)
        assert_close(compiled(x), scale_and_sum(x))


def test_a_program_whose_size_is_alone_in_its_bucket_serves_no_other(recorder: Recorder) -> None:
    compiled = torch.compile(scale_and_sum, backend="dynaxla")
    x = torch.randn(40)
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Exact())
    compiled(x)
    dynaxla.freeze(compiled, "next_bucket")
    with recorder.expect(compiles=0, misses=1):
        assert_close(compiled(x[:30]), scale_and_sum(x[:30]))


def test_a_miss_compiles_in_the_background(
    warm: tuple[Callable[[torch.Tensor], torch.Tensor], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, recorder = warm
    asked: list[CompileJob] = []
    submit = process().compile_service.submit
    monkeypatch.setattr(CompileService, "submit", lambda self, job: asked.append(job))
    dynaxla.freeze(compiled, "background")
    x = torch.randn(12)
    with recorder.expect(compiles=0, misses=3):
        for _ in range(3):
            assert_close(compiled(x), scale_and_sum(x))
    (job,) = asked
    assert job.asked == 3, "one compile for all calls that wait for it"
    monkeypatch.undo()
    with recorder.expect(compiles=1), jobs(1):
        submit(job)
    with recorder.expect(compiles=0, misses=0):
        assert_close(compiled(x), scale_and_sum(x))


def test_a_compile_that_fails_in_the_background_is_not_tried_again(
    warm: tuple[Callable[[torch.Tensor], torch.Tensor], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, recorder = warm
    dynaxla.freeze(compiled, "background")
    no = pack_answer(CompileFailed("no", ()))
    monkeypatch.setattr(ChildProcess, "ask", lambda *_: no)
    x = torch.randn(12)
    with recorder.expect(jobs_failed=1), jobs(1):
        assert_close(compiled(x), scale_and_sum(x))
    with recorder.expect(jobs_failed=0, served_eager=1):
        assert_close(compiled(x), scale_and_sum(x))


def test_a_part_between_eager_ops_runs_in_eager(recorder: Recorder) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli((x * 2).sigmoid() * 0 + 1).softmax(0) + x

    compiled = torch.compile(function, backend="dynaxla", options={"rng": "eager"})
    x = torch.randn(5, 3)
    dynaxla.mark_bucketed(x, 0)
    compiled(x)
    assert recorder.snapshot().eager_ops
    dynaxla.freeze(compiled, "eager")
    y = torch.randn(40, 3)
    with recorder.expect(compiles=0, misses=2):  # what is in front of the draw, and what is behind it
        assert_close(compiled(y), function(y))


def test_functions_are_frozen_apart(recorder: Recorder) -> None:
    """Two modules of one class share the graphs that Dynamo captured."""
    one, other = (torch.compile(nn.Linear(4, 4), backend="dynaxla") for _ in range(2))
    x = torch.randn(5, 4)
    with torch.no_grad():
        for compiled in (one, other):
            compiled(x), compiled(torch.randn(7, 4))
        dynaxla.freeze(other)
        with recorder.expect(compiles=1):
            one(torch.randn(20, 4))
        with recorder.expect(compiles=0), pytest.raises(FrozenError):
            other(torch.randn(40, 4))
        y = torch.randn(2, 3, 4)
        with recorder.expect(compiles=0), pytest.raises(FrozenError):
            other(y)
        with recorder.expect(compiles=1):
            for _ in range(2):
                assert_close(one(y), one._orig_mod(y))
        assert_close(other(y), other._orig_mod(y))


def test_a_module_compiled_in_place(recorder: Recorder) -> None:
    net = Net()
    net.compile(backend="dynaxla")
    x = marked(3, 9, 2)
    with torch.no_grad():
        assert dynaxla.warmup(net, (x,), progress=False)
        dynaxla.freeze(net)
        with recorder.expect(compiles=0), pytest.raises(FrozenError):
            net(ids(5, 9))


def test_threads_compile_different_buckets_side_by_side(
    warm: tuple[Callable[[torch.Tensor], torch.Tensor], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, recorder = warm
    together = threading.Barrier(2, timeout=60)
    compile_once = Pipeline.compile

    def meeting(self: Pipeline, *args: Any, **named: Any) -> object:
        together.wait()  # breaks unless two threads are here at once
        return compile_once(self, *args, **named)

    monkeypatch.setattr(Pipeline, "compile", meeting)
    inputs = [torch.randn(12), torch.randn(30)]
    results: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda x=x: results.update({len(x): compiled(x)})) for x in inputs]
    with recorder.expect(compiles=2):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for x in inputs:
        assert_close(results[len(x)], scale_and_sum(x))


def test_threads_compile_one_bucket_once(
    warm: tuple[Callable[[torch.Tensor], torch.Tensor], Recorder],
) -> None:
    compiled, recorder = warm
    inputs = [torch.randn(9 + i) for i in range(6)]
    threads = [threading.Thread(target=compiled, args=(x,)) for x in inputs]
    with recorder.expect(compiles=1):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
