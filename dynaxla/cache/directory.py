"""One directory of entries: which files are there, when each was last used, and whether they may be believed."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dynaxla.cache.entry import NAME
from dynaxla.cache.permissions import find_distrust_of
from dynaxla.cache.size_journal import Journal
from dynaxla.isolation.disk import TEMPORARY, make_folder

_ABANDONED_NS = 3_600 * 10**9
"""How old a half-written file is when nobody can be at work on it."""

_LOOK_S = 0.02
"""How often it is looked whether a lock is free."""

KEPT_SHARE = 0.9
"""What is left of the bound, so that not every entry behind it costs a count."""


@dataclass(frozen=True, slots=True)
class EntryFile:
    """A file of the directory.

    Attributes:
        path: where.
        size: bytes.
        used_ns: when it was last read or written, in nanoseconds since 1970.
    """

    path: Path
    size: int
    used_ns: int


class Directory:
    """The entries below one cache folder.

    Attributes:
        root: the cache folder.
        entries: the folder of entries in it, which need not exist.
        lock: a file that is locked by who counts and removes.
        journal: how many bytes are there, about.
    """

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = Path(os.path.abspath(root))
        self.entries = self.root / "entries"
        # Beside the entries, not above them: nobody else can put anything there.
        self.lock = self.entries / "lock"
        self.journal = Journal(self.entries / "journal")
        self._read_only = read_only
        self._seen: tuple[int, ...] = ()
        self._refusal: str | None = None

    def not_used(self) -> str | None:
        """Why the directory is not used; None if it is. It is looked at again when it was made anew or changed hands.

        Raises:
            FileNotFoundError: there is none.
        """
        try:
            status = os.stat(self.entries)
            seen = (status.st_dev, status.st_ino, status.st_mode, status.st_uid)
            if seen != self._seen:
                self._refusal = find_distrust_of(self.entries, read_only=self._read_only)
                self._seen = seen
        except FileNotFoundError:
            raise
        except OSError as error:
            return f"{self.entries} is not used: {error.strerror}"
        return self._refusal

    def make(self) -> None:
        """Makes it where it is missing.

        Raises:
            OSError: it cannot be made.
        """
        make_folder(self.entries)

    def remove(self, path: Path) -> bool:
        """Removes what stands at the place of an entry; whether it is gone."""
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                path.rmdir()
            else:
                path.unlink()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def touch(self, path: Path) -> None:
        """Says that an entry was used now."""
        stamp_ns = self.journal.stamp()
        try:
            os.utime(path, ns=(stamp_ns, stamp_ns), follow_symlinks=False)
        except OSError:
            return  # on its way out, or on a disk that is read only: the order is then that of writing

    def list_entries(self) -> Iterator[EntryFile]:
        """Every entry, in no order; none if there is no directory."""
        for name, status in self._files():
            if NAME.fullmatch(name):
                yield EntryFile(self.entries / name, status.st_size, status.st_mtime_ns)

    def remove_abandoned(self, *, however_young: bool = False) -> int:
        """Removes files that were being written when their process died; gives their bytes."""
        removed = 0
        for name, status in self._files():
            old = abs(time.time_ns() - status.st_mtime_ns) > _ABANDONED_NS
            if (
                name.startswith(".")
                and name.endswith(TEMPORARY)
                and (old or however_young)
                and self.remove(self.entries / name)
            ):
                removed += status.st_size
        return removed

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        try:
            with os.scandir(self.entries) as listing:
                for file in listing:
                    try:
                        yield file.name, file.stat(follow_symlinks=False)
                    except OSError:
                        continue  # removed by another process
        except OSError:
            return


def make_room(directory: Directory, max_bytes: int, *, keep: Path | None) -> int:
    """Counts a directory and removes entries until it is below its bound; gives how many.

    Where another process is at it already, nothing is done.

    Args:
        keep: the entry that has just been written, None where it is not known.
    """
    with hold(directory.lock, 0) as held:
        if not held:
            return 0
        before = directory.journal.total()
        directory.remove_abandoned()
        entries = sorted(directory.list_entries(), key=lambda found: found.used_ns)
        total = sum(found.size for found in entries)
        removed = 0
        if total > max_bytes:
            for found in entries:
                if total <= KEPT_SHARE * max_bytes:
                    break
                if found.path != keep and directory.remove(found.path):
                    total -= found.size
                    removed += 1
        with suppress(OSError):  # without a journal the next writer counts again
            directory.journal.settle(before, total)
        return removed


@contextmanager
def hold(path: Path, wait_s: float) -> Iterator[bool]:
    """Holds a lock among all threads and processes, for which is waited so long; whether it is held.

    It is free when its process ends, however that ends. Where files cannot be locked, everybody holds it.
    """
    lock = FileLock(path, timeout=wait_s, poll_interval=_LOOK_S)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError):
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
