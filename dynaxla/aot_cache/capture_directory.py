"""The bound on this package's captures in torch's folder: those that were used least recently go."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dynaxla.cache.directory import Directory, EntryFile, make_room
from dynaxla.cache.size_journal import Journal
from dynaxla.torch_api.capture_cache import captures_folder, find_key_folders

MAX_BYTES = 1 << 30
"""Of this package's captures in torch's folder."""

_OF_TORCH = 1 << 13
"""About what torch adds to a graph: its account of inputs and outputs."""


class CaptureDirectory(Directory):
    """The captures of this package: an entry is the folder of a key, in which is a file for each set of guards on sizes."""

    def __init__(self) -> None:
        entries = captures_folder()
        super().__init__(entries.parent)
        self.entries = entries
        self.lock, self.journal = self.entries / ".dynaxla-lock", Journal(self.entries / ".dynaxla-journal")

    def count(self, content: bytes) -> None:
        """Adds a graph that torch is about to store."""
        self.journal.add(len(content) + _OF_TORCH)

    def keep_bound(self, key: Path | None, max_bytes: int | None = None) -> int:
        """Removes entries if there are more bytes than the bound allows; gives how many. Nothing is listed otherwise.

        Args:
            key: the entry that has just been written, which stays.
            max_bytes: the bound; None is that of the package.
        """
        most, total = MAX_BYTES if max_bytes is None else max_bytes, self.journal.total()
        if not self.entries.is_dir() or (total is not None and total <= most):
            return 0
        return make_room(self, most, keep=key)

    def remove(self, path: Path) -> bool:
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    def remove_abandoned(self, *, however_young: bool = False) -> int:
        return 0  # torch's own, within the entries

    def list_entries(self) -> Iterator[EntryFile]:
        for path in find_key_folders():
            with suppress(OSError):  # another process has just removed it
                used_ns, files = path.stat().st_mtime_ns, list(path.iterdir())
                yield EntryFile(path, sum(file.stat().st_size for file in files), used_ns)
