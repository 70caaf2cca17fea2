"""The queue in virtual time: what leaves it, when, and with whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dynaxla.bucket_policy import Explicit
from dynaxla.serving.batch.batcher import BatchRequest, BucketGroups
from dynaxla.serving.request_queue import RequestQueue
from dynaxla.serving.settings import Settings

SETTINGS = Settings(max_size=64, sizes=Explicit((8, 16, 32, 64)), max_batch=4, max_padded=128, max_wait_s=0.010)


def _request(size: int, at: float = 0.0, deadline_s: float = math.inf) -> BatchRequest:
    due_at = at + min(SETTINGS.max_wait_s, deadline_s / 2)
    return BatchRequest(None, size, SETTINGS.bucket(size), due_at, accepted_at=at, deadline_s=deadline_s)


def _waiting(*requests: BatchRequest) -> BucketGroups:
    waiting = BucketGroups(SETTINGS)
    for request in requests:
        waiting.add(request)
    return waiting


def test_a_group_waits_for_company_but_not_longer_than_its_first() -> None:
    first, second = _request(5, at=1.0), _request(8, at=1.004)
    waiting = _waiting(first, second)
    assert waiting.take_batch(1.009) == []
    assert waiting.due_at() == first.due_at == 1.010
    assert waiting.take_batch(1.010) == [first, second]
    assert len(waiting) == 0
    assert waiting.due_at() == math.inf


def test_a_full_group_runs_at_once_and_the_rest_stays() -> None:
    requests = [_request(30, at=1.0) for _ in range(5)]
    waiting = _waiting(*requests)
    assert waiting.due_at() == -math.inf
    assert waiting.take_batch(1.0) == requests[:4]
    assert waiting.take_batch(1.0) == []
    assert len(waiting) == 1


def test_of_two_due_groups_the_one_that_waited_longest_runs() -> None:
    old, *young = _request(60, at=1.0), *[_request(3, at=1.5) for _ in range(4)]
    waiting = _waiting(*young, old)
    assert waiting.take_batch(2.0) == [old]
    assert waiting.take_batch(2.0) == young


def test_a_request_with_little_time_is_due_early() -> None:
    waiting = _waiting(_request(5, at=1.0), _request(5, at=1.001, deadline_s=0.004))
    assert waiting.due_at() == 1.003


def test_in_a_all_due_every_group_is_due() -> None:
    request = _request(5, at=1.0)
    assert _waiting(request).take_batch(1.0, all_due=True) == [request]


def test_late_requests_leave_on_their_own() -> None:
    late, other = _request(5, at=1.0, deadline_s=0.5), _request(5, at=1.0)
    waiting = _waiting(late, other)
    assert RequestQueue(waiting, SETTINGS.max_queue).take_obsolete(1.499) == []
    assert RequestQueue(waiting, SETTINGS.max_queue).take_obsolete(1.5) == [late]
    assert RequestQueue(waiting, SETTINGS.max_queue).take_all() == [other]
    assert len(waiting) == 0


def test_a_request_leaves_once() -> None:
    request = _request(5)
    waiting = _waiting(request)
    assert waiting.remove(request)
    assert not waiting.remove(request)
    assert not waiting.remove(_request(60))


@dataclass(frozen=True)
class Batch:
    requests: Sequence[BatchRequest]
    at: float
    idle_since: float


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.001, 0.004, 0.03]),
        st.integers(1, 64),
        st.sampled_from([math.inf, math.inf, 0.002, 0.05]),
    ),
    max_size=60,
)


def _simulate(arrivals: Sequence[BatchRequest], run_s: float) -> tuple[list[Batch], list[BatchRequest]]:
    """A worker that is busy for `run_s` per batch, in virtual time."""
    waiting, to_come = BucketGroups(SETTINGS), list(arrivals)
    batches: list[Batch] = []
    late: list[BatchRequest] = []
    now = idle_since = 0.0
    while to_come or len(waiting):
        while to_come and to_come[0].accepted_at <= now:
            waiting.add(to_come.pop(0))
        late += RequestQueue(waiting, SETTINGS.max_queue).take_obsolete(now)
        batch = waiting.take_batch(now)
        if batch:
            batches.append(Batch(batch, now, idle_since))
            now = idle_since = now + run_s
        elif to_come or len(waiting):
            now = min(waiting.due_at(), to_come[0].accepted_at if to_come else math.inf)
    return batches, late


@given(ARRIVALS, st.sampled_from([0.0, 0.003, 0.02]))
def test_the_promises_of_the_queue(drawn: list[tuple[float, int, float]], run_s: float) -> None:
    now, arrivals = 1.0, []
    for gap, size, deadline_s in drawn:
        now += gap
        arrivals.append(_request(size, now, deadline_s))
    batches, late = _simulate(arrivals, run_s)
    left = [request for batch in batches for request in batch.requests] + late
    assert sorted(map(id, left)) == sorted(map(id, arrivals)), "every request leaves exactly once"
    for batch in batches:
        bucket = batch.requests[0].bucket
        assert {request.bucket for request in batch.requests} == {bucket}
        assert len(batch.requests) <= SETTINGS.max_rows(bucket)
        assert not any(request.is_late(batch.at) for request in batch.requests)
        for request in batch.requests:
            since = max(request.accepted_at, batch.idle_since)
            assert batch.at - since <= SETTINGS.max_wait_s + 1e-9, "an idle worker lets nobody wait longer"
    for bucket in (8, 16, 32, 64):
        of_bucket = [request.accepted_at for batch in batches for request in batch.requests if request.bucket == bucket]
        assert of_bucket == sorted(of_bucket), "first come, first run within a bucket"


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(1, 64))
def test_no_group_starves(others: list[int], size: int) -> None:
    """Once a request is due, at most the groups with an older first request run before it."""
    mine = _request(size, at=1.0)
    waiting = _waiting(mine, *[_request(other, at=1.0 + 0.0001 * i) for i, other in enumerate(others, 1)])
    assert mine in waiting.take_batch(mine.due_at)
