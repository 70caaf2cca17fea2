"""What processes leave on disk for each other: in which folder, and so that nobody reads half of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "DYNAXLA_CACHE_DIR"
OFF = "off"
"""In its place: nothing compiled is kept; what compilers died of is, in the user's cache folder."""

TEMPORARY = ".tmp"
"""How the name of a file ends that is being written."""


@dataclass(frozen=True, slots=True)
class CacheFolders:
    """Attributes:
    own: the folder that this user's processes write to; it need not exist.
    behind: folders that are only read, in the order in which they are looked through.
    """

    own: Path
    behind: tuple[Path, ...] = ()


def cache_folders() -> CacheFolders:
    """What DYNAXLA_CACHE_DIR names, "OWN" or "OWN:READ_ONLY:...", read anew; for an empty OWN, and for "off", the user's
    cache folder."""
    named = os.environ.get(CACHE_VARIABLE, "")
    own, *behind = ("" if named == OFF else named).split(os.pathsep)
    return CacheFolders(_absolute(own) if own else _users(), tuple(_absolute(path) for path in behind if path))


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, that no other user can write to, whatever the umask.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def replace_file(path: Path, pieces: Iterable[bytes], *, stamp_ns: int | None = None) -> None:
    """Writes a file, readable by its owner alone, aside and renames it: a reader sees the old one or the whole new one.

    It is not synced: after a power failure it may be torn.

    Args:
        pieces: the content.
        stamp_ns: the file's time of modification, in nanoseconds since 1970; None is now.

    Raises:
        OSError: it cannot be written; then nothing is left.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.writelines(pieces)
            if stamp_ns is not None:
                stream.flush()
                os.utime(handle, ns=(stamp_ns, stamp_ns))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _users() -> Path:
    """The user's cache folder; one among temporary files for a user who has no home, as in some containers."""
    folder = platformdirs.user_cache_path("dynaxla")
    return folder if folder.is_absolute() else Path(tempfile.gettempdir()) / f"dynaxla-{os.getuid()}"


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
