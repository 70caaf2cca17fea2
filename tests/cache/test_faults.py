"""Whatever happens to the files, a value is the one that was put there, or it is missed; nothing raises."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynaxla.cache import entry as entries
from dynaxla.cache.entry import HEAD_BYTES, entry_name, pack
from dynaxla.cache.key import Key
from dynaxla.cache.store import Counters, Store

VALUE = bytes(range(256)) * 4
OTHER = Key.of(other=True)


def _put(store: Store, key: Key) -> Path:
    assert store.put("executable", key, VALUE, about={"ops": 3})
    return store._own.entries / entry_name("executable", key)


def _assert_missed(store: Store, key: Key, path: Path) -> None:
    """A counted miss, of what is then gone, so that the next value is kept and found."""
    before = store.counters()
    assert store.get("executable", key) is None
    after = store.counters()
    assert (after.hits, after.misses, after.corrupt) == (before.hits, before.misses + 1, before.corrupt + 1)
    assert not os.path.lexists(path)
    assert store.put("executable", key, VALUE)
    assert store.get("executable", key) == VALUE


def test_an_entry_cut_anywhere_is_missed(store: Store, key: Key, full: bool) -> None:
    path = _put(store, key)
    content = path.read_bytes()
    for size in range(0, len(content), 1 if full else 23):
        path.write_bytes(content[:size])
        _assert_missed(store, key, path)


def test_an_entry_with_any_bit_flipped_is_missed(store: Store, key: Key, full: bool) -> None:
    path = _put(store, key)
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 1 if full else 61):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        _assert_missed(store, key, path)


@pytest.mark.parametrize("more", [b"\0", VALUE])
def test_an_entry_with_something_behind_is_missed(store: Store, key: Key, more: bytes) -> None:
    path = _put(store, key)
    path.write_bytes(path.read_bytes() + more)
    _assert_missed(store, key, path)


def _no_json(key: Key) -> bytes:
    """A file whose checksum is right and whose description is none."""
    sizes = entries._SIZES.pack(entries.MAGIC, entries.FORMAT, 3, 1)
    return sizes + entries._checksum(sizes, b"[1]", b"v") + b"[1]v"


def _huge(key: Key) -> bytes:
    """A file that says of itself that it is the largest there can be."""
    return entries._SIZES.pack(entries.MAGIC, entries.FORMAT, 2**32 - 1, 2**64 - 1) + bytes(64)


def _of_next_format(key: Key) -> bytes:
    content = b"".join(pack("executable", key, VALUE, {}))
    return content.replace(entries.MAGIC + b"\0\0\0\2", entries.MAGIC + b"\0\0\0\3", 1)


FOREIGN: dict[str, Callable[[Key], bytes]] = {
    "empty": lambda key: b"",
    "text": lambda key: b"something else altogether " * 40,
    "zeros": lambda key: bytes(4096),
    "another key": lambda key: b"".join(pack("executable", OTHER, VALUE, {})),
    "another kind": lambda key: b"".join(pack("lowered", key, VALUE, {})),
    "another format": _of_next_format,
    "no description": _no_json,
    "huge": _huge,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_entry_of_this_key_is_missed(store: Store, key: Key, content: Callable[[Key], bytes]) -> None:
    path = _put(store, key)
    path.write_bytes(content(key))
    _assert_missed(store, key, path)


def test_a_sparse_file_of_a_size_that_it_claims_is_not_read(tmp_path: Path, key: Key) -> None:
    store = Store(tmp_path, max_bytes=1 << 20)
    path = _put(store, key)
    size = 1 << 40
    with path.open("wb") as file:
        file.write(entries._SIZES.pack(entries.MAGIC, entries.FORMAT, 2, size - HEAD_BYTES - 2))
        file.truncate(size)
    _assert_missed(store, key, path)


def _link(path: Path) -> None:
    shutil.copy(path, path.parent / "copy")
    path.unlink()
    path.symlink_to(path.parent / "copy")


def _socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
        os.rename("s", path.name)
    finally:
        os.chdir(here)


REPLACED: dict[str, Callable[[Path], object]] = {
    "link to a good entry": _link,
    "link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "socket": _socket,
    "writable by all": lambda path: path.chmod(0o666),
    "writable by its group": lambda path: path.chmod(0o620),
}


@pytest.mark.parametrize("damage", REPLACED.values(), ids=REPLACED)
def test_what_is_no_file_of_this_user_is_missed(store: Store, key: Key, damage: Callable[[Path], object]) -> None:
    path = _put(store, key)
    damage(path)
    _assert_missed(store, key, path)


def test_an_entry_of_another_user_is_missed(store: Store, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _put(store, key)
    if os.geteuid() == 0:
        os.chown(path, 4242, 4242)
    else:
        status = os.fstat
        monkeypatch.setattr(
            os, "fstat", lambda handle: os.stat_result([*status(handle)[:4], 4242, *status(handle)[5:10]])
        )
    assert store.get("executable", key) is None
    assert store.counters().corrupt == 1
    assert not path.exists()


def test_a_folder_with_something_in_it_in_place_of_an_entry(store: Store, key: Key) -> None:
    """It is not ours to remove."""
    path = _put(store, key)
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("keep")
    for _ in range(2):
        assert store.get("executable", key) is None
        assert not store.put("executable", key, VALUE)
    assert (path / "mine").read_text() == "keep"
    assert (store.counters().corrupt, store.counters().write_errors) == (2, 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir(mode=0o700)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip("this process may not mount: the other tests make writes fail in other ways")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_what_it_has(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(small_disk)
    keys = [Key.of(number=number) for number in range(10)]
    kept = [store.put("executable", key, bytes([number]) * 60_000) for number, key in enumerate(keys)]
    assert any(kept)
    assert not all(kept)
    for number, key in enumerate(keys):
        assert store.get("executable", key) == (bytes([number]) * 60_000 if kept[number] else None)
    assert store.counters().write_errors == kept.count(False)
    assert caplog.text.count("No space left on device") == 1
    assert not list(store._own.entries.glob(".*"))


def test_a_write_that_ends_half_way(store: Store, key: Key) -> None:
    """The system's limit on the size of files: the first half is on the disk when the rest fails."""
    path = _put(store, key)
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        assert not store.put("executable", key, bytes(1 << 20))
        assert not store.put("executable", OTHER, bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.get("executable", key) == VALUE, "the value before is whole"
    assert store.get("executable", OTHER) is None
    assert store.counters().write_errors == 2
    assert [found.path for found in store._own.list_entries()] == [path]
    assert not list(store._own.entries.glob(".*"))


def _failing(number: int) -> Callable[..., None]:
    def fail(*args: object, **keywords: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE], ids=os.strerror)
@pytest.mark.parametrize("function", ["os.replace", "os.fdopen", "tempfile.mkstemp", "os.utime", "os.mkdir", "os.open"])
def test_whatever_the_system_refuses(
    function: str, number: int, store: Store, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the call is not needed the value is kept all the same."""
    _put(store, key)
    with monkeypatch.context() as patch:
        patch.setattr(function, _failing(number))
        kept = store.put("executable", OTHER, VALUE)
        assert store.get("executable", key) in (None, VALUE)
        assert store.get("executable", OTHER) in (None, VALUE)
    assert store.get("executable", key) == VALUE
    assert store.get("executable", OTHER) == (VALUE if kept else None)
    assert store.counters().write_errors == (not kept)
    assert store.counters().corrupt == 0, "it was no fault of the entry"


@pytest.fixture
def read_only(key: Key) -> Iterator[tuple[Store, Path]]:
    """A store with one entry in a folder to which this user cannot write; root can write everywhere, so "nobody" tries."""
    root = Path(tempfile.mkdtemp())
    path = _put(Store(root), key)
    user = os.geteuid()
    if user == 0:
        for each in (root, *root.rglob("*")):
            os.chown(each, 65534, -1)
        os.seteuid(65534)
    for folder in (root / "entries", root):
        folder.chmod(0o500)
    yield Store(root), path
    os.seteuid(user)
    for folder in (root, root / "entries"):
        folder.chmod(0o700)
    shutil.rmtree(root)


def test_a_directory_that_is_read_only(
    read_only: tuple[Store, Path], key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = read_only
    assert store.get("executable", key) == VALUE
    assert [store.put("executable", OTHER, VALUE) for _ in range(3)] == [False] * 3
    assert store.get("executable", OTHER) is None
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    assert store.get("executable", key) is None
    assert path.read_bytes() == b"damaged"
    assert store.counters() == Counters(hits=1, misses=2, corrupt=1, write_errors=3, read_bytes=len(VALUE))
    assert caplog.text.count("a value was not kept") == 1


@pytest.mark.parametrize("what", ["", "entries"], ids=["all of it", "the entries"])
def test_the_directory_is_deleted_while_it_is_used(store: Store, key: Key, what: str) -> None:
    for _ in range(3):
        _put(store, key)
        assert store.get("executable", key) == VALUE
        shutil.rmtree(store._own.root / what)
        assert store.get("executable", key) is None
    assert store.counters() == Counters(hits=3, misses=3, read_bytes=3 * len(VALUE), written_bytes=3 * len(VALUE))


@pytest.mark.parametrize("what", ["", "entries"], ids=["root", "entries"])
@pytest.mark.parametrize("obstacle", ["file", "link to nothing", "link to itself"])
def test_something_else_stands_in_the_way(
    tmp_path: Path, key: Key, obstacle: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    place = root / what
    place.parent.mkdir(exist_ok=True)
    if obstacle == "file":
        place.write_text("mine")
    else:
        place.symlink_to("nothing" if obstacle == "link to nothing" else place)
    store = Store(root)
    for _ in range(2):
        assert store.get("executable", key) is None
        assert not store.put("executable", key, VALUE)
    assert store.counters().misses == 2
    assert os.path.lexists(place)
    assert not stat.S_ISDIR(place.lstat().st_mode)
    assert len(caplog.records) <= 2


JOURNALS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "text": lambda path: path.write_text("what a fine day"),
    "negative": lambda path: path.write_bytes(b"\xff" * 16),
    "enormous": lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f"),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "link": lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
    "link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("name", ["journal", "lock"])
@pytest.mark.parametrize("damage", JOURNALS.values(), ids=JOURNALS)
def test_the_bound_holds_without_a_journal_or_a_lock(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    store = Store(tmp_path, max_bytes=4000)
    keys = [Key.of(number=number) for number in range(8)]
    _put(store, keys[0])
    (tmp_path / "entries" / name).touch()
    damage(tmp_path / "entries" / name)
    for key in keys:
        _put(store, key)
        assert store.get("executable", key) == VALUE
    assert sum(found.size for found in store._own.list_entries()) <= 4000
    assert store.counters().write_errors == 0
