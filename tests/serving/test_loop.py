"""The server with models that are functions: who gets which answer, whatever the others do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaxla.bucket_policy import Explicit
from dynaxla.errors import (
    DeadlineExceeded,
    NotServing,
    OptionError,
    QueueFull,
    RequestRejected,
    RequestTooLarge,
    ServingError,
)
from dynaxla.serving import BatchFinished, Observer, Outcome, RequestFinished, Server, Settings, State

SETTINGS = Settings(max_size=64, sizes=Explicit((8, 16, 32, 64)), max_batch=4, max_wait_s=0.001, max_queue=8)
SOON_S = 20.0


@dataclass
class Recording(Observer):
    """An observer that keeps what it is told."""

    ends: list[RequestFinished] = field(default_factory=list)
    runs: list[BatchFinished] = field(default_factory=list)

    def request_finished(self, event: RequestFinished) -> None:
        self.ends.append(event)

    def batch_finished(self, event: BatchFinished) -> None:
        self.runs.append(event)

    def count(self, outcome: Outcome) -> int:
        return sum(end.outcome is outcome for end in self.ends)


class Gate:
    """A model that upper-cases, and holds its first batch until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[str]:
        self.batches.append(list(texts))
        self.reached.set()
        assert self.go_on.wait(SOON_S)
        return _upper(texts)


def _upper(texts: Sequence[str]) -> list[str]:
    return [text.upper() for text in texts]


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Busy:
    server: Server[str, str]
    gate: Gate
    first: Future[str]
    seen: Recording


@contextmanager
def _busy(settings: Settings = SETTINGS, **arguments: Any) -> Iterator[Busy]:
    """A server whose worker is held in a batch of one."""
    gate, seen = Gate(), Recording()
    with Server(gate, len, settings, observer=seen, **arguments) as server:
        first = server.submit("first")
        assert gate.reached.wait(SOON_S)
        try:
            yield Busy(server, gate, first, seen)
        finally:
            gate.go_on.set()


def test_answers_come_back_to_their_own_request() -> None:
    with Server(_upper, len, SETTINGS) as server, ThreadPoolExecutor(8) as threads:
        texts = [chr(97 + i % 26) * (1 + i % 60) for i in range(200)]

        def ask(text: str) -> str:
            while True:
                try:
                    return server.submit(text).result(SOON_S)
                except QueueFull:
                    continue

        assert list(threads.map(ask, texts)) == _upper(texts)


def test_requests_that_wait_are_batched_by_bucket() -> None:
    with _busy() as busy:
        futures = busy.server.submit_all(["aa", "b" * 30, "cc", "d" * 31, "eee"])
        assert busy.server.queue_depth == 5
        busy.gate.go_on.set()
        assert [future.result(SOON_S)[0] for future in futures] == ["A", "B", "C", "D", "E"]
        assert busy.gate.batches[1:] == [["aa", "cc", "eee"], ["b" * 30, "d" * 31]]
    run = busy.seen.runs[1]
    assert (run.sizes, run.padded_rows, run.padded_size, run.failed) == ((2, 2, 3), 4, 8, False)
    assert busy.first.result() == "FIRST"


def test_only_the_guilty_request_gets_the_error() -> None:
    def run(texts: Sequence[str]) -> list[str]:
        if "bad" in texts:
            raise ZeroDivisionError("bad")
        return _upper(texts)

    seen = Recording()
    with Server(run, len, SETTINGS, observer=seen) as server:
        futures = server.submit_all(["one", "two", "bad", "four"])
        assert [f.result(SOON_S) for f in (futures[0], futures[1], futures[3])] == ["ONE", "TWO", "FOUR"]
        with pytest.raises(ZeroDivisionError, match="bad"):
            futures[2].result(SOON_S)
    assert [(len(run.sizes), run.failed) for run in seen.runs] == [
        (4, True), (2, False), (2, True), (1, True), (1, False)
    ]  # fmt: skip
    assert (seen.count(Outcome.OK), seen.count(Outcome.FAILED)) == (3, 1)


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_errors_harm_nobody_else(guilty: list[bool]) -> None:
    def run(payloads: Sequence[bool]) -> list[str]:
        if any(payloads):
            raise ValueError
        return ["fine"] * len(payloads)

    with Server(run, lambda _: 1, SETTINGS) as server:
        futures = server.submit_all(guilty)
        wait(futures, SOON_S)
        assert [isinstance(future.exception(), ValueError) for future in futures] == guilty
        assert server.submit(False).result(SOON_S) == "fine"


def test_a_wrong_number_of_results_is_an_error() -> None:
    with (
        Server(lambda texts: ["x", "y"], len, SETTINGS) as server,
        pytest.raises(ServingError, match="2 results for 1"),
    ):
        server.submit("a").result(SOON_S)


@pytest.mark.parametrize(
    ("payload", "deadline_s", "error", "named"),
    [
        ("", None, RequestRejected, "size 0"),
        ("x" * 65, None, RequestTooLarge, "65"),
        ("x", 0.0, RequestRejected, "deadline_s"),
        ("x", float("nan"), RequestRejected, "deadline_s"),
    ],
)
def test_a_bad_request_is_rejected_at_once(payload: str, deadline_s: float, error: type, named: str) -> None:
    seen = Recording()
    with Server(_upper, len, SETTINGS, observer=seen) as server, pytest.raises(error, match=named):
        server.submit_all(["good", payload], deadline_s)
    assert seen.count(Outcome.REJECTED) == 2
    assert not seen.runs


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    with _busy() as busy:
        held = busy.server.submit_all(["x"] * 6)
        with pytest.raises(QueueFull) as caught:
            busy.server.submit_all(["y"] * 3)
        assert (caught.value.waiting, busy.server.queue_depth) == (6, 6)
        assert caught.value.retry_after_s > 0
        held += busy.server.submit_all(["z"] * 2)
        with pytest.raises(RequestRejected, match="never fit"):
            busy.server.submit_all(["y"] * 9)
        busy.gate.go_on.set()
        assert len([f.result(SOON_S) for f in held]) == 8
        assert busy.server.submit("again").result(SOON_S) == "AGAIN"
    assert (busy.seen.count(Outcome.QUEUE_FULL), busy.seen.count(Outcome.OK)) == (3, 10)


def test_a_cancelled_request_leaves_its_place_and_is_not_run() -> None:
    with _busy() as busy:
        futures = busy.server.submit_all(["keep"] * 7 + ["drop"])
        assert futures[-1].cancel()
        assert busy.server.queue_depth == 7
        busy.server.submit("place")
        assert not busy.first.cancel(), "it is running"
        busy.gate.go_on.set()
        with pytest.raises(CancelledError):
            futures[-1].result(SOON_S)
        assert busy.first.result(SOON_S) == "FIRST"
    assert "drop" not in [text for batch in busy.gate.batches for text in batch]
    assert busy.seen.count(Outcome.CANCELLED) == 1


def test_a_request_past_its_deadline_is_not_run() -> None:
    clock = HandClock()
    with _busy(replace(SETTINGS, max_wait_s=0.0), clock=clock) as busy:
        late, in_time = busy.server.submit("late", deadline_s=0.5), busy.server.submit("in time", deadline_s=5.0)
        clock.now += 1.0
        busy.gate.go_on.set()
        with pytest.raises(DeadlineExceeded, match=r"0\.5 s"):
            late.result(SOON_S)
        assert in_time.result(SOON_S) == "IN TIME"
    assert busy.gate.batches == [["first"], ["in time"]]
    assert busy.seen.count(Outcome.EXPIRED) == 1


def test_an_answer_that_comes_too_late_is_an_error() -> None:
    clock = HandClock()
    gate = Gate()
    with Server(gate, len, replace(SETTINGS, max_wait_s=0.0), clock=clock) as server:
        future = server.submit("slow", deadline_s=0.5)
        assert gate.reached.wait(SOON_S)
        clock.now += 1.0
        gate.go_on.set()
        with pytest.raises(TimeoutError, match="not answered within"):
            future.result(SOON_S)


def test_nothing_is_accepted_before_the_preparation_is_done() -> None:
    prepared = threading.Event()
    server = Server(_upper, len, SETTINGS, prepare=lambda: prepared.wait(SOON_S))
    with pytest.raises(NotServing, match="not started"):
        server.submit("x")
    server.start()
    with pytest.raises(NotServing, match="starting"):
        server.submit("x")
    with pytest.raises(NotServing, match="starting"):
        server.wait_until_ready(0.01)
    with pytest.raises(NotServing, match="starting"):
        server.start()
    prepared.set()
    server.wait_until_ready(SOON_S)
    assert server.state is State.SERVING
    assert server.submit("x").result(SOON_S) == "X"
    server.drain()
    assert server.state is State.CLOSED


def test_a_failed_preparation_breaks_the_server() -> None:
    def prepare() -> None:
        raise OptionError("no such model")

    server = Server(_upper, len, SETTINGS, prepare=prepare)
    server.start()
    with pytest.raises(NotServing, match="broken"):
        server.wait_until_ready(SOON_S)
    assert server.drain(SOON_S)


def test_a_worker_that_dies_leaves_nobody_waiting() -> None:
    def run(texts: Sequence[str]) -> list[str]:
        raise SystemExit

    with Server(run, len, SETTINGS) as server:
        futures = server.submit_all(["a", "b" * 20])
        for future in futures:
            with pytest.raises(NotServing, match="broken"):
                future.result(SOON_S)
        with pytest.raises(NotServing, match="broken"):
            server.submit("c")


def test_drain_waits_for_what_was_accepted() -> None:
    with _busy() as busy:
        accepted = busy.server.submit_all(["x", "y" * 20, "z" * 40])
        drained: list[bool] = []
        drainer = threading.Thread(target=lambda: drained.append(busy.server.drain(SOON_S)))
        drainer.start()
        while busy.server.state is State.SERVING:
            pass
        with pytest.raises(NotServing, match="draining"):
            busy.server.submit("late")
        busy.gate.go_on.set()
        drainer.join(SOON_S)
        assert drained == [True]
        assert all(future.done() for future in [busy.first, *accepted])
        assert accepted[1].result() == "Y" * 20
    assert busy.seen.count(Outcome.NOT_SERVING) == 1


def test_a_drain_that_runs_out_of_time_tells_those_that_wait() -> None:
    with _busy() as busy:
        waiting = busy.server.submit("x")
        assert not busy.server.drain(0.01)
        with pytest.raises(NotServing, match="draining"):
            waiting.result(SOON_S)
        busy.gate.go_on.set()
        assert busy.first.result(SOON_S) == "FIRST"
    assert busy.seen.count(Outcome.ABANDONED) == 1


def test_a_drain_during_the_preparation_does_not_wait_for_it() -> None:
    go_on = threading.Event()
    server = Server(_upper, len, SETTINGS, prepare=lambda: go_on.wait(SOON_S))
    server.start()
    assert server.drain()
    go_on.set()
    with pytest.raises(NotServing):
        server.wait_until_ready(SOON_S)


def test_no_accepted_request_is_lost_when_many_submit_during_a_drain() -> None:
    seen = Recording()
    server = Server(_upper, len, SETTINGS, observer=seen)
    server.start()
    server.wait_until_ready(SOON_S)
    accepted: list[Future[str]] = []
    started = threading.Barrier(9)

    def submit() -> None:
        started.wait()
        while True:
            try:
                accepted.append(server.submit("x"))
            except QueueFull:
                continue
            except NotServing:
                return

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait()
    while len(accepted) < 50:
        pass
    assert server.drain(SOON_S)
    for thread in threads:
        thread.join(SOON_S)
    assert all(future.done() and future.result() == "X" for future in accepted)
    assert seen.count(Outcome.OK) == len(accepted)


Act = tuple[str, int]
ACTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask bad", "cancel", "short of time"]), st.integers(1, 64)), max_size=40
)


@given(ACTS)
def test_every_accepted_request_gets_exactly_one_answer(acts: list[Act]) -> None:
    seen = Recording()
    run: Callable[[Sequence[tuple[str, int]]], list[int]] = lambda payloads: [_run_one(*p) for p in payloads]  # noqa: E731
    futures = []
    refused = 0
    with Server(run, lambda payload: payload[1], SETTINGS, observer=seen) as server:
        for act in acts:
            try:
                futures.append(server.submit(act, deadline_s=1e-6 if act[0] == "short of time" else None))
            except QueueFull:
                refused += 1
                continue
            if act[0] == "cancel":
                futures[-1].cancel()
    assert all(future.done() for future in futures)
    assert len(seen.ends) == len(acts)
    assert seen.count(Outcome.QUEUE_FULL) == refused
    assert all(len({SETTINGS.bucket(size) for size in run.sizes}) == 1 for run in seen.runs)


def _run_one(act: str, size: int) -> int:
    if act == "ask bad":
        raise ValueError(act)
    return size
