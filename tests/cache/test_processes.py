"""Many processes use one directory at once, and some of them are killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from dynaxla.cache.entry import read_entry
from dynaxla.cache.key import Key
from dynaxla.cache.store import Store
from tests.cache.forking import forked, status_of
from tests.lists import quick


def _key(number: int) -> Key:
    return Key.of(number=number)


def _value(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() * (50 + 40 * number)


def _use(store: Store, seed: int, turns: int) -> None:
    """Reads and writes at random, and raises at a value that is another one's."""
    draw = random.Random(seed)
    for _ in range(turns):
        number = draw.randrange(40)
        if draw.random() < 0.5:
            store.put("executable", _key(number), _value(number), about={"number": number})
        elif (found := store.get("executable", _key(number))) is not None:
            assert found == _value(number)
    counters = store.counters()
    assert (counters.corrupt, counters.write_errors, counters.refused) == (0, 0, 0)


@pytest.mark.parametrize("processes", quick([20, 100], 20))
def test_many_processes_read_and_write(tmp_path: Path, processes: int) -> None:
    max_bytes = 400_000  # of 1.6 MB, so that all evict
    children = [
        forked(lambda seed=seed: _use(Store(tmp_path, max_bytes=max_bytes), seed, 60)) for seed in range(processes)
    ]
    assert [status_of(child) for child in children] == [0] * processes
    store = Store(tmp_path, max_bytes=max_bytes)
    store.put("executable", _key(0), _value(0), about={"number": 0})
    entries = list(store._own.list_entries())
    assert entries
    assert sum(found.size for found in entries) <= max_bytes
    assert not list(store._own.entries.glob(".*")), "nothing is left half-written"
    for found in entries:
        description, value = read_entry(found.path, max_bytes)
        assert value == _value(description.about["number"])


def test_children_go_on_with_the_store_of_their_parent(store: Store) -> None:
    """One object, copied by the fork."""
    store.put("executable", _key(1), _value(1))
    children = [forked(lambda seed=seed: _use(store, seed, 30)) for seed in range(4)]
    assert [status_of(child) for child in children] == [0] * 4
    assert store.get("executable", _key(1)) == _value(1)


def test_a_process_is_killed_while_it_writes(tmp_path: Path, full: bool) -> None:
    """At any moment there is the value before, or the whole new one."""
    values = [bytes([byte]) * 2_000_000 for byte in range(4)]

    def write() -> None:
        store, turn = Store(tmp_path), 0
        while True:
            turn += 1
            store.put("executable", _key(turn % 3), values[turn % 4])

    draw, reader = random.Random(0), Store(tmp_path)
    for number in range(3):
        reader.put("executable", _key(number), values[0])
    for _ in range(60 if full else 15):
        child = forked(write)
        time.sleep(draw.uniform(0.001, 0.06))
        os.kill(child, signal.SIGKILL)
        assert status_of(child) == -signal.SIGKILL
        for number in range(3):
            assert reader.get("executable", _key(number)) in values
    assert reader.counters().corrupt == 0
    reader._own.remove_abandoned(however_young=True)
    assert not list(reader._own.entries.glob(".*"))


def test_a_process_is_killed_while_it_makes_room(tmp_path: Path) -> None:
    """Its lock ends with it, and the next one keeps the bound."""

    def write() -> None:
        store = Store(tmp_path, max_bytes=30_000)
        for number in range(10**6):
            store.put("executable", _key(number), bytes(3000))

    for pause_s in (0.01, 0.02, 0.03, 0.05, 0.08):
        child = forked(write)
        time.sleep(pause_s)
        os.kill(child, signal.SIGKILL)
        status_of(child)
    store = Store(tmp_path, max_bytes=30_000)
    for number in range(12):
        assert store.put("executable", _key(number), bytes(3000))
        assert store.get("executable", _key(number)) == bytes(3000)
    assert sum(found.size for found in store._own.list_entries()) <= 30_000


def test_who_cannot_lock_goes_on(tmp_path: Path) -> None:
    """Another process makes room already, and takes long: nobody waits for it."""
    from filelock import FileLock

    store = Store(tmp_path, max_bytes=10_000)
    store.put("executable", _key(0), bytes(3000))
    with FileLock(tmp_path / "entries" / "lock"):
        started = time.monotonic()
        for number in range(1, 6):
            assert store.put("executable", _key(number), bytes(3000))
        assert time.monotonic() - started < 5
        assert store.counters().evicted == 0
    store.put("executable", _key(6), bytes(3000))
    assert sum(found.size for found in store._own.list_entries()) <= 10_000


def _share(store: Store, makes: Path, wait_s: float = 60.0, seconds: float = 0.0) -> bytes:
    """Reads a value, or makes it as one of several processes that want it."""
    found = store.get("executable", _key(1))
    if found is not None:
        return found
    with store.claim("executable", _key(1), wait_s) as is_there:
        if is_there and (found := store.get("executable", _key(1))) is not None:
            return found
        with makes.open("a") as file:
            file.write("m")
        time.sleep(seconds)
        store.put("executable", _key(1), _value(1))
        return _value(1)


def test_a_value_is_made_once(tmp_path: Path) -> None:
    def check() -> None:
        assert _share(Store(tmp_path), tmp_path / "makes", seconds=0.3) == _value(1)

    children = [forked(check) for _ in range(8)]
    assert [status_of(child) for child in children] == [0] * 8
    assert (tmp_path / "makes").read_text() == "m"
    assert not list((tmp_path / "entries").glob(".*")), "no lock is left"


def test_nobody_waits_for_a_killed_process_nor_beyond_the_limit(tmp_path: Path) -> None:
    def hold() -> None:
        with Store(tmp_path).claim("executable", _key(1), 60.0):
            (tmp_path / "held").touch()
            time.sleep(600)

    child = forked(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with Store(tmp_path).claim("executable", _key(1), 0.1) as is_there:
        assert not is_there  # the limit is over, and the other one is at it still
    with Store(tmp_path).claim("executable", _key(2), 600.0) as is_there:
        assert not is_there  # another value
    os.kill(child, signal.SIGKILL)
    status_of(child)
    assert _share(Store(tmp_path), tmp_path / "makes", wait_s=600.0) == _value(1)


def test_those_who_waited_in_vain_go_on_side_by_side(tmp_path: Path) -> None:
    """Where the value cannot be kept, nobody waits twice."""

    def fail() -> None:
        with Store(tmp_path).claim("executable", _key(1), 60.0) as is_there:
            (tmp_path / "held").touch()
            assert not is_there
            time.sleep(0.3)

    def wait() -> None:
        with Store(tmp_path).claim("executable", _key(1), 60.0) as is_there:
            assert not is_there
            (tmp_path / f"at it {os.getpid()}").touch()
            while len(list(tmp_path.glob("at it*"))) < 3:
                time.sleep(0.01)

    first = forked(fail)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    children = [first, *(forked(wait) for _ in range(3))]
    assert [status_of(child) for child in children] == [0] * 4
