"""What a native compiler failed on, remembered across processes: what killed a child once is not tried again."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dynaxla.isolation.disk import cache_folders, make_folder
from dynaxla.isolation.forking import new_lock


@dataclass(frozen=True, slots=True)
class CompilerFailure:
    """One call that torch-mlir cannot lower, or one module that XLA's compiler dies of.

    Attributes:
        op: the overload.
        error_id: the id of the error, such as "DX302".
        explanation: what happened.
        repro: path of a script that shows it, or None.
    """

    op: str
    error_id: str
    explanation: str
    repro: str | None = None


class KnownFailures:
    """A set of failures by key, kept in memory and, one JSON line each, in a file. Safe from threads and processes.

    Args:
        path: the file; None keeps them in memory alone. A line that cannot be read is ignored, so a damaged file costs
            only what it said.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = new_lock()
        self._found: dict[str, CompilerFailure] = {} if path is None else _read(path)

    @property
    def empty(self) -> bool:
        """Whether nothing is known to fail, as nearly always."""
        return not self._found

    def get(self, key: str) -> CompilerFailure | None:
        """What is known of the call with this key, or None."""
        return self._found.get(_digest(key))

    def add(self, key: str, failure: CompilerFailure, *, on_disk: bool) -> None:
        """Remembers a failure; on disk for later processes, where it was the end of a child process."""
        with self._lock:
            self._found[_digest(key)] = failure
            if self._path is not None and on_disk:
                _append(self._path, json.dumps({"key": _digest(key), **asdict(failure)}))


def failures_file(library: str) -> Path | None:
    """Where what a library fails on is kept, apart by its version: the next one may have learned. None: it is not installed."""
    try:
        return cache_folders().own / f"failures-{library}-{version(library)}.jsonl"
    except PackageNotFoundError:
        return None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _read(path: Path) -> dict[str, CompilerFailure]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        try:
            entry = json.loads(line)
            key = entry.pop("key")
            found[key] = CompilerFailure(**entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def _append(path: Path, line: str) -> None:
    """One write of one line: processes that append at the same time do not mix their lines."""
    try:
        make_folder(path.parent)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return  # a cache that cannot be written is a cache that forgets
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)
