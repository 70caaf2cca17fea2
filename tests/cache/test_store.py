"""What is put is found, until the bound is passed; what was used last stays longest."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dynaxla.cache.directory import Directory
from dynaxla.cache.entry import pack, read_description
from dynaxla.cache.key import Key
from dynaxla.cache.size_journal import MOST_RECORDS, Journal
from dynaxla.cache.store import Counters, Store, open_store
from dynaxla.isolation import disk
from dynaxla.isolation.failures import failures_file


def _keys(count: int) -> list[Key]:
    return [Key.of(number=number) for number in range(count)]


def _value(key: Key) -> bytes:
    return key.digest.encode() * 20


def _kept(store: Store, keys: list[Key]) -> list[int]:
    folder = store._own.entries
    return [number for number, key in enumerate(keys) if (folder / f"{key.digest}.lowered").exists()]


def _room_for(folder: Path, count: int) -> Store:
    """A store whose bound is passed by entry number `count`."""
    (key,) = _keys(1)
    size = sum(map(len, pack("executable", key, _value(key), {})))
    return Store(folder, max_bytes=count * (size + 10))


@pytest.mark.parametrize("value", [b"", b"x", os.urandom(3 << 20)], ids=["empty", "small", "large"])
def test_what_is_put_is_found(store: Store, key: Key, value: bytes) -> None:
    assert store.get("executable", key) is None
    assert store.put("executable", key, value, about={"ops": 3})
    assert store.get("executable", key) == value
    assert store.counters() == Counters(hits=1, misses=1, read_bytes=len(value), written_bytes=len(value))


def test_kinds_and_keys_are_apart(store: Store, key: Key) -> None:
    store.put("executable", key, b"one")
    store.put("lowered", key, b"two")
    assert (store.get("executable", key), store.get("lowered", key)) == (b"one", b"two")
    assert store.get("executable", Key.of(module=b"another")) is None


def test_another_store_and_another_process_find_it(tmp_path: Path, key: Key) -> None:
    Store(tmp_path).put("executable", key, b"value")
    assert Store(tmp_path).get("executable", key) == b"value"


def test_the_later_value_is_kept(store: Store, key: Key) -> None:
    for value in (b"one", b"another"):
        store.put("executable", key, value)
    assert store.get("executable", key) == b"another"


def test_what_is_said_about_a_value_is_kept(store: Store) -> None:
    key = Key.of(module=b"m", options=("a", 1))
    store.put("executable", key, b"v", about={"ops": 12, "compile_s": 0.25})
    (found,) = store._own.list_entries()
    said = read_description(found.path, 1 << 20)
    assert (said.kind, said.digest, said.parts) == ("executable", key.digest, dict(key.parts))
    assert said.about == {"ops": 12, "compile_s": 0.25}


@pytest.mark.parametrize("kind", ["", "Executable", "../x", "a.b", "a/b", "x" * 40, "a1"])
def test_a_kind_is_a_word(store: Store, key: Key, kind: str) -> None:
    with pytest.raises(ValueError, match="is no kind"):
        store.get(kind, key)
    with pytest.raises(ValueError, match="is no kind"):
        store.put(kind, key, b"")


def test_a_value_that_is_of_no_use_is_a_miss_and_gone(store: Store, key: Key) -> None:
    store.put("executable", key, b"not what XLA wants")
    assert store.get("executable", key) is not None
    store.reject("executable", key)
    assert store.get("executable", key) is None
    assert (store.counters().hits, store.counters().misses, store.counters().corrupt) == (0, 2, 1)


def test_files_are_their_owners_alone(store: Store, key: Key) -> None:
    before = os.umask(0)
    try:
        store.put("executable", key, b"value")
    finally:
        os.umask(before)
    (found,) = store._own.list_entries()
    assert found.path.stat().st_mode & 0o777 == 0o600
    assert found.path.parent.stat().st_mode & 0o777 == 0o700
    assert found.path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_the_bound_holds_and_the_least_recently_used_go(tmp_path: Path) -> None:
    store, keys = _room_for(tmp_path, 5), _keys(12)
    for key in keys[:5]:
        store.put("lowered", key, _value(key))
    assert _kept(store, keys) == [0, 1, 2, 3, 4]
    assert store.get("lowered", keys[0]) is not None
    store.put("lowered", keys[5], _value(keys[5]))
    assert _kept(store, keys) == [0, 3, 4, 5], "0 was read after 1 and 2 were written"
    for key in keys[6:]:
        store.put("lowered", key, _value(key))
        assert sum(found.size for found in store._own.list_entries()) <= store.max_bytes
        assert store.get("lowered", key) is not None, "what was just written is not what goes"
    assert store.counters().evicted == 12 - len(_kept(store, keys))


def test_the_bound_is_that_of_all_kinds_and_processes(tmp_path: Path) -> None:
    keys = _keys(8)
    for number, key in enumerate(keys):
        one = _room_for(tmp_path, 3)  # as if a process each
        one.put("lowered" if number % 2 else "executable", key, _value(key))
        assert sum(found.size for found in one._own.list_entries()) <= one.max_bytes
    assert one.get("lowered", keys[-1]) == _value(keys[-1])


def test_a_value_above_the_bound_is_not_kept(tmp_path: Path, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path, max_bytes=1000)
    small = Key.of(small=True)
    store.put("executable", small, b"x")
    assert [store.put("executable", key, bytes(1000)) for _ in range(3)] == [False] * 3
    assert store.get("executable", key) is None
    assert store.get("executable", small) == b"x"
    assert store.counters().write_errors == 3
    assert caplog.text.count("above the bound of 1000 bytes") == 1


def test_no_directory_is_listed_below_the_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = _keys(20)
    store.put("lowered", keys[0], b"the first is counted")

    def no_scan(path: object) -> None:
        raise AssertionError("listed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", no_scan)
        for key in keys[1:]:
            assert store.put("lowered", key, b"v")
            assert store.get("lowered", key) == b"v"


def test_an_order_of_use_survives_a_clock_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, keys = _room_for(tmp_path, 5), _keys(8)
    for key in keys[:5]:
        store.put("lowered", key, _value(key))
    monkeypatch.setattr("time.time_ns", lambda: 10**18)  # 2001
    assert store.get("lowered", keys[0]) is not None
    assert Store(tmp_path).get("lowered", keys[1]) is not None
    store.put("lowered", keys[5], _value(keys[5]))
    assert _kept(store, keys) == [0, 1, 4, 5], "2 and 3 were used least recently"
    monkeypatch.undo()
    assert store.get("lowered", keys[0]) is not None
    store.put("lowered", keys[6], _value(keys[6]))
    store.put("lowered", keys[7], _value(keys[7]))
    assert _kept(store, keys) == [0, 5, 6, 7]


def test_an_order_of_use_survives_a_clock_that_was_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, keys = _room_for(tmp_path, 3), _keys(6)
    monkeypatch.setattr("time.time_ns", lambda: 4 * 10**18)  # 2096
    store.put("lowered", keys[0], _value(keys[0]))
    monkeypatch.undo()
    for key in keys[1:]:
        store.put("lowered", key, _value(key))
        assert store.get("lowered", key) is not None
    assert _kept(store, keys)[-2:] == [4, 5]


def test_half_written_files_are_removed_when_they_are_old(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    directory.make()
    for name, age_s in (("young", 0), ("old", 7200), ("ahead", -7200)):
        path = directory.entries / f".{name}.tmp"
        path.write_bytes(bytes(10))
        stamp_ns = path.stat().st_mtime_ns - age_s * 10**9
        os.utime(path, ns=(stamp_ns, stamp_ns))
    assert directory.remove_abandoned() == 20
    assert [path.name for path in directory.entries.iterdir()] == [".young.tmp"]


def test_a_journal_sums_what_all_append(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert journal.total() is None, "nobody has counted"
    assert journal.add(5) is None
    journal.settle(None, 100)
    assert journal.add(5) == 105
    assert Journal(path).add(-10) == journal.total() == 95
    before = journal.total()
    Journal(path).add(7)  # by another process, which is not seen by who counts 50
    journal.settle(before, 50)
    assert journal.total() == 57
    for damaged in (b"123", b"\xff" * 8, bytes(8 * MOST_RECORDS)):
        path.write_bytes(damaged)
        assert journal.add(0) is None
        journal.settle(journal.total(), 3)
        assert journal.total() == 3


def test_folders_behind_are_read_and_left_as_they_are(tmp_path: Path, key: Key) -> None:
    other = Key.of(other=True)
    for folder, value in (("first", b"1"), ("second", b"2")):
        Store(tmp_path / folder).put("executable", key, value)
    Store(tmp_path / "second").put("executable", other, b"3")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in _files(tmp_path)}
    store = Store(tmp_path / "own", behind=[tmp_path / "nothing", tmp_path / "first", tmp_path / "second"])
    assert (store.get("executable", key), store.get("executable", other)) == (b"1", b"3")
    assert store.get("lowered", key) is None
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in _files(tmp_path)} == before
    store.put("executable", key, b"own")
    assert store.get("executable", key) == b"own"
    assert (store.counters().hits, store.counters().misses) == (3, 1)


def test_a_damaged_entry_does_not_hide_a_good_one_behind(tmp_path: Path, key: Key) -> None:
    for folder in ("own", "first", "second"):
        Store(tmp_path / folder).put("executable", key, folder.encode())
    for folder in ("own", "first"):
        (path,) = (tmp_path / folder / "entries").glob("*.executable")
        path.write_bytes(path.read_bytes()[:-1])
    store = Store(tmp_path / "own", behind=[tmp_path / "first", tmp_path / "second"])
    assert store.get("executable", key) == b"second"
    assert (store.counters().hits, store.counters().misses, store.counters().corrupt) == (1, 0, 2)
    assert not list((tmp_path / "own" / "entries").glob("*.executable"))
    assert list((tmp_path / "first" / "entries").glob("*.executable")), "it is only read"


def test_threads_share_a_store(store: Store) -> None:
    keys = _keys(20)

    def work() -> None:
        for key in keys:
            if (value := store.get("lowered", key)) is not None:
                assert value == _value(key)
            assert store.put("lowered", key, _value(key))

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = store.counters()
    assert counters.hits + counters.misses == 100
    assert counters.written_bytes == 100 * len(_value(keys[0]))
    assert (counters.corrupt, counters.write_errors) == (0, 0)


def test_the_variable_names_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Key) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(disk.CACHE_VARIABLE, raising=False)
    assert disk.cache_folders() == disk.CacheFolders(tmp_path / "home" / "dynaxla")
    for value, own, behind in [
        (f"{tmp_path}/a", tmp_path / "a", ()),
        (f"{tmp_path}/a:{tmp_path}/b::{tmp_path}/c", tmp_path / "a", (tmp_path / "b", tmp_path / "c")),
        (f":{tmp_path}/b", tmp_path / "home" / "dynaxla", (tmp_path / "b",)),
        ("", tmp_path / "home" / "dynaxla", ()),
        ("~/x", Path.home() / "x", ()),
        ("x", Path.cwd() / "x", ()),
    ]:
        monkeypatch.setenv(disk.CACHE_VARIABLE, value)
        assert disk.cache_folders() == disk.CacheFolders(own, behind)
    Store(tmp_path / "shared").put("executable", key, b"value")
    monkeypatch.setenv(disk.CACHE_VARIABLE, f"{tmp_path}/mine:{tmp_path}/shared")
    assert failures_file("jaxlib").parent == tmp_path / "mine"
    store = open_store()
    assert store.get("executable", key) == b"value"
    assert store.put("executable", key, b"mine")
    assert (tmp_path / "mine" / "entries").is_dir()


def test_who_has_no_home_has_a_folder_among_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(disk.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache") / name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert disk.cache_folders().own == tmp_path / f"dynaxla-{os.getuid()}"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
