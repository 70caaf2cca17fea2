"""The cache that every kind of program stands in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from dynaxla.diagnostics import ManyPrograms
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.program_cache import ProgramCache


def test_what_is_used_stays() -> None:
    cache: ProgramCache[int, int] = ProgramCache(8)
    for number in range(100):
        dropped = cache.put(number, -number)
        assert dropped == ([] if number < 8 else [1 if number == 8 else number - 7])
        cache.mark_used(0)
        assert cache.get(0) == 0
    assert len(cache) == 8
    assert cache.get(99) == -99
    assert 50 not in cache


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_small_caches_drop_the_least_recently_used(capacity: int) -> None:
    cache: ProgramCache[int, int] = ProgramCache(capacity)
    for key in range(capacity):
        cache.put(key, key)
    cache.mark_used(0)
    assert cache.put(capacity, 0) == [1 if capacity > 1 else 0]


def test_what_is_gone_may_be_marked() -> None:
    cache: ProgramCache[int, int] = ProgramCache(2)
    cache.put(1, 1)
    cache.put(2, 2)
    cache.mark_used(3)
    cache.drop([1, 3])
    assert list(cache.keys()) == [2]


def test_a_program_is_made_once() -> None:
    cache: ProgramCache[str, object] = ProgramCache(4)
    made: list[str] = []

    def make() -> object:
        made.append("one")
        time.sleep(0.05)
        return object()

    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get_or_make("key", make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["one"]
    assert len(set(map(id, found))) == 1


def test_another_key_does_not_wait() -> None:
    cache: ProgramCache[int, int] = ProgramCache(4)
    assert cache.get_or_make(1, lambda: cache.get_or_make(2, lambda: 2)) == 2


def test_who_fails_leaves_the_key_to_the_next() -> None:
    cache: ProgramCache[int, int] = ProgramCache(4)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make(1, lambda: 1 // 0)
    assert cache.get_or_make(1, lambda: 3) == 3


def test_warnings_count_the_new_program_and_those_that_go(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    cache: ProgramCache[int, int] = ProgramCache(2, recorder)

    def notices() -> Iterator[ManyPrograms]:
        yield ManyPrograms(len(cache), "one for each", "sizes of here", "use fewer")

    with caplog.at_level(logging.WARNING, "dynaxla"):
        for key in range(3):
            cache.put(key, key, notices())
    assert [line.partition(" programs")[0][-1] for line in recorder.snapshot().many_programs] == ["1", "2", "3"]
    assert len(caplog.records) == 3
