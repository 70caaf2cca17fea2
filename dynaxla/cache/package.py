"""A package: entries with a document about them, for processes elsewhere. It is a folder, or bytes.

    DIR/manifest.json                          the document: what was compiled for what, and of every file its SHA-256
    DIR/entries/<64 digits of the key>.<kind>  as in a cache folder

A folder is used by naming it behind the cache folder: whom it trusts, which entries it believes and what becomes of one that
is damaged is as with any other folder that is only read.

    entry of kind "package": the document is what it says about its value; its value is the entries, one behind the other

Bytes go where torch puts them, into the file of a compiled function or into torch's cache of captures.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dynaxla.cache.directory import Directory
from dynaxla.cache.entry import DamagedEntry, entry_name, pack, unpack, unpack_all
from dynaxla.cache.environment_key import versions
from dynaxla.cache.key import Key
from dynaxla.errors import OptionError, PackageError
from dynaxla.isolation.disk import TEMPORARY

MANIFEST = "manifest.json"
FORMAT = 2
"""Of the document and of entries."""

_KIND = "package"
_READERS = ("torch", "jaxlib", "dynaxla")
"""Whose versions have to be those that wrote a package: its values neither hold nor need what torch-mlir makes."""

_FOLDER_MODE, _FILE_MODE = 0o755, 0o644  # for others to read; less where the umask says so


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """Attributes:
    file: its path below the package's folder.
    bytes: its size.
    sha256: of its content, in hexadecimal digits.
    """

    file: str
    bytes: int
    sha256: str


class Archive:
    """The entries of a package in memory; found and put as in a `Store`."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], tuple[Key, bytes]] = {}

    def get(self, kind: str, key: Key) -> bytes | None:
        """The value under this kind and key, or None."""
        found = self._values.get((kind, key.digest))
        return None if found is None else found[1]

    def put(self, kind: str, key: Key, value: bytes) -> None:
        """Adds a value."""
        self._values[kind, key.digest] = key, value

    def copy(self) -> Archive:
        """Another one, of the same values."""
        other = Archive()
        other._values.update(self._values)
        return other

    def pack(self, document: Mapping[str, Any]) -> bytes:
        """The package as bytes."""
        values = self._values.items()
        entries = [piece for (kind, _), (key, value) in values for piece in pack(kind, key, value, {})]
        return b"".join(
            pack(_KIND, Key.of(entries=sorted(self._values)), b"".join(entries), {"format": FORMAT, **document})
        )

    @classmethod
    def unpack(cls, content: bytes) -> tuple[Mapping[str, Any], Archive]:
        """The document and the entries of a package that is bytes.

        Raises:
            PackageError: it is no package, a byte of it is another one, or other versions wrote it.
        """
        archive = cls()
        try:
            description, value = unpack(content)
            if description.kind != _KIND:
                raise DamagedEntry(f"it is of kind {description.kind}")
            _check_versions(description.versions)
            for each, entry in unpack_all(value):
                archive.put(each.kind, Key(each.digest), entry)
        except DamagedEntry as damage:
            raise PackageError(f"what was saved is damaged: {damage}", "save it anew") from None
        return description.about, archive


def _check_versions(wrote: Mapping[str, str]) -> None:
    """Raises PackageError if other versions wrote a package."""
    pairs = {name: (str(wrote.get(name)), str(versions().get(name))) for name in _READERS}
    other = [f"{name} {its[:12]}, here {own[:12]}" for name, (its, own) in pairs.items() if its != own]
    if other:
        raise PackageError(f"it was saved with other versions: {'; '.join(other)}", "save it anew with those here")


class PackageWriter:
    """A package that is being written: beside its place, in which it then appears whole or not at all. A context manager.

    Args:
        folder: its place: nothing is there, or an empty folder.

    Raises:
        OptionError: something is there, or the folder above is not.
        OSError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        _require_free(self.folder)
        self._made = self.folder.parent / f".{self.folder.name}.{uuid.uuid4().hex}{TEMPORARY}"
        self._made.mkdir(mode=_FOLDER_MODE)
        self._entries = Directory(self._made).entries
        self._entries.mkdir(mode=_FOLDER_MODE)

    def add(self, kind: str, key: Key, value: bytes, about: Mapping[str, Any]) -> PackagedFile:
        """Writes an entry.

        Raises:
            ValueError, TypeError: as `dynaxla.cache.entry.pack` does.
            OSError: it cannot be written.
        """
        pieces = pack(kind, key, value, about)
        path = self._entries / entry_name(kind, key)
        _write(path, b"".join(pieces))
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        return PackagedFile(str(path.relative_to(self._made)), sum(map(len, pieces)), digest.hexdigest())

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Writes what the package says of itself, as JSON, and puts it into its place.

        Raises:
            OptionError: something is in its place by now.
            OSError: it cannot be written.
        """
        text = json.dumps({"format": FORMAT, **manifest}, indent=2, allow_nan=False)
        _write(self._made / MANIFEST, f"{text}\n".encode())
        _require_free(self.folder)
        os.replace(self._made, self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._made, ignore_errors=True)  # gone, if it was finished


def read_package(folder: Path) -> dict[str, Any]:
    """The manifest of a package, every file of which is as it was written.

    Raises:
        Damaged: it is no package, or of another format, or a file is not as it was.
        OSError: it cannot be read.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        written_format = manifest["format"]
        files = {program["file"]: program["sha256"] for program in manifest["programs"] if program.get("file")}
    except FileNotFoundError:
        raise DamagedEntry(f"{folder} is no package: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedEntry(f"{folder / MANIFEST} cannot be read") from None
    if written_format != FORMAT:
        raise DamagedEntry(f"{folder} is of format {written_format}, not {FORMAT}")
    for file, expected in files.items():
        if Path(file).parent != Path(Directory(folder).entries.name):
            raise DamagedEntry(f"{folder / MANIFEST} names a file elsewhere: {file}")
        _check(folder / file, expected)
    return manifest  # type: ignore[no-any-return]


def _check(path: Path, expected: str) -> None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedEntry(f"{path} is missing") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise DamagedEntry(f"{path} is not as it was written")


def _require_free(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        if any(folder.iterdir()):
            raise OptionError(f"the folder {folder} is not empty", "name a new one: nothing is written over")
    elif os.path.lexists(folder):
        raise OptionError(f"{folder} is there, and no folder", "name a new one: nothing is written over")
    elif not folder.parent.is_dir():
        raise OptionError(f"there is no folder {folder.parent}", "make it, or name another place")


def _write(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
