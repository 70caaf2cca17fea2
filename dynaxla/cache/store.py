"""What was compiled and lowered, kept on disk: bytes in, the same bytes out or nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynaxla.cache.directory import Directory, hold, make_room
from dynaxla.cache.entry import DamagedEntry, entry_name, pack, read_value
from dynaxla.cache.key import Key
from dynaxla.isolation.disk import CACHE_VARIABLE, OFF, TEMPORARY, cache_folders, replace_file
from dynaxla.isolation.forking import new_lock
from dynaxla.observe.usage import CacheUse

logger = logging.getLogger("dynaxla")

MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Counters:
    """What a store did since it was made.

    Attributes:
        hits: values found.
        misses: values not found, those included that were not to be believed.
        corrupt: entries not to be believed (damaged, of another format, not this user's); each is removed if it can be.
        evicted: entries removed to keep the bound.
        refused: directories that are not used, because others can write to them or they cannot be read.
        write_errors: values that were not kept: a full disk, one that is read only, a value above the bound.
        read_bytes, written_bytes: of values.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    evicted: int = 0
    refused: int = 0
    write_errors: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class Store:
    """Values by kind and key, in a directory of this user's and behind it in others that are only read.

    Any thread and any number of processes may use it at any time. No method raises because of what is on disk, of what the disk
    cannot do, or of what other processes do meanwhile: a value is not found then, or not kept.

    Args:
        folder: the cache folder, made when it is first written to.
        behind: cache folders in which is looked for what is not there, in this order.
        max_bytes: the bound on the entries of `folder`: above it those that were used least recently are removed.
    """

    def __init__(self, folder: Path, *, behind: Iterable[Path] = (), max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._own = Directory(folder)
        self._behind = [Directory(root, read_only=True) for root in behind]
        self._counters = Counters()
        self._uses: dict[str, CacheUse] = {}
        self._lock = new_lock()
        self._told: set[str] = set()

    def counters(self) -> Counters:
        """A snapshot."""
        return self._counters

    def uses(self) -> Mapping[str, CacheUse]:
        """What was found, read and written, by kind; a snapshot."""
        with self._lock:
            return dict(self._uses)

    def get(self, kind: str, key: Key) -> bytes | None:
        """The value that was put under this kind and key, or None.

        Raises:
            ValueError: a kind is a word of small letters.
        """
        name = entry_name(kind, key)
        for directory in (self._own, *self._behind):
            value = self._read(directory, directory.entries / name, kind, key)
            if value is not None:
                self._use(kind, hits=1, read_bytes=len(value))
                return value
        self._use(kind, misses=1)
        return None

    def put(self, kind: str, key: Key, value: bytes, about: Mapping[str, Any] | None = None) -> bool:
        """Keeps a value; whether it was written.

        Args:
            about: what a reader of `python -m dynaxla cache list` wants to know of it, as JSON.

        Raises:
            ValueError: a kind is a word of small letters; more than a MiB is said about a value.
            TypeError: `about` cannot be written as JSON.
        """
        path = self._own.entries / entry_name(kind, key)
        pieces = pack(kind, key, value, about or {})
        size = sum(map(len, pieces))
        if size > self.max_bytes:
            self._not_kept(f"it is above the bound of {self.max_bytes} bytes")
            return False
        try:
            written = self._write(path, pieces)
        except OSError as error:
            self._not_kept(f"{self._own.entries}: {error.strerror}")
            return False
        if written:
            self._use(kind, written_bytes=len(value))
            self._keep_bound(path, size)
        return written

    @contextmanager
    def claim(self, kind: str, key: Key, wait_s: float) -> Iterator[bool]:
        """Is held by who makes a value; others that want to make it wait until it is made; whether it is there.

        Nobody waits for longer than `wait_s`, nor for a process that ended. Where the value is not there after all, those who
        waited make it side by side.
        """
        path = self._own.entries / entry_name(kind, key)
        lock = path.with_name(f".{path.name}{TEMPORARY}")
        try:
            self._own.make()
            usable = not self._refused(self._own)
        except OSError:
            usable = False
        if not usable:
            yield False
            return
        with _hold_once(lock, 0) as held:
            if held:
                yield path.exists()
        if not held:
            with _hold_once(lock, wait_s):
                pass
            yield path.exists()

    def reject(self, kind: str, key: Key) -> None:
        """Says that what `get` gave is of no use to who understands it: it is removed, and was a miss."""
        self._own.remove(self._own.entries / entry_name(kind, key))
        self._use(kind, hits=-1, misses=1)
        self._count(corrupt=1)

    def _read(self, directory: Directory, path: Path, kind: str, key: Key) -> bytes | None:
        own = directory is self._own
        try:
            if self._refused(directory):
                return None
            value = read_value(path, kind, key, self.max_bytes)
        except DamagedEntry as damage:
            logger.info("the cache entry %s is not used: %s", path, damage)
            self._count(corrupt=1)
            if own:
                directory.remove(path)
            return None
        except (OSError, MemoryError):
            return None
        if own:
            directory.touch(path)
        return value

    def _write(self, path: Path, pieces: list[bytes]) -> bool:
        self._own.make()
        if self._refused(self._own):
            return False
        replace_file(path, pieces, stamp_ns=self._own.journal.stamp())
        return True

    def _keep_bound(self, path: Path, size: int) -> None:
        total = self._own.journal.add(size)
        if total is None or total > self.max_bytes:
            self._count(evicted=make_room(self._own, self.max_bytes, keep=path))

    def _refused(self, directory: Directory) -> bool:
        refusal = directory.not_used()
        if refusal is not None and self._first(refusal):
            self._count(refused=1)
            logger.warning("cache: %s", refusal)
        return refusal is not None

    def _not_kept(self, reason: str) -> None:
        self._count(write_errors=1)
        if self._first(reason):
            logger.warning("cache: a value was not kept: %s (%s names another folder)", reason, CACHE_VARIABLE)

    def _first(self, text: str) -> bool:
        """Whether this is said for the first time."""
        with self._lock:
            first = text not in self._told
            self._told.add(text)
        return first

    def _use(self, kind: str, **amounts: int) -> None:
        self._count(**amounts)
        with self._lock:
            self._uses[kind] = self._uses.get(kind, CacheUse()) + CacheUse(**amounts)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            changed = {name: getattr(self._counters, name) + amount for name, amount in amounts.items()}
            self._counters = replace(self._counters, **changed)


@contextmanager
def _hold_once(lock: Path, wait_s: float) -> Iterator[bool]:
    """As `hold`, and leaves no file: who waits for a lock makes it anew."""
    with hold(lock, wait_s) as held:
        try:
            yield held
        finally:
            if held:
                with suppress(OSError):
                    lock.unlink()


def open_store(max_bytes: int = MAX_BYTES) -> Store | None:
    """The store in the folders that DYNAXLA_CACHE_DIR names, or in the user's cache folder; None where it says "off"."""
    if os.environ.get(CACHE_VARIABLE) == OFF:
        return None
    folders = cache_folders()
    return Store(folders.own, behind=folders.behind, max_bytes=max_bytes)
