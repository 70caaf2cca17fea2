"""One value as an entry, a file or bytes: a fixed head, a description, the value; and a checksum over all of it.

    magic 8, format 4, bytes of the description 4, bytes of the value 8, SHA-256 of what is before and behind 32 | JSON | value

Numbers are unsigned, most significant byte first. An entry is believed only if every byte of it is as it was written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaxla.cache.environment_key import versions
from dynaxla.cache.key import Key
from dynaxla.cache.permissions import find_other_writers

MAGIC = b"dynaxla\n"
FORMAT = 2
KIND = re.compile(r"[a-z][a-z_]{0,31}")
NAME = re.compile(r"(?P<digest>[0-9a-f]{64})\.(?P<kind>[a-z][a-z_]{0,31})")
_SIZES = struct.Struct(">8sIIQ")
_CHECKSUM_BYTES = 32
HEAD_BYTES = _SIZES.size + _CHECKSUM_BYTES
_MOST_DESCRIPTION_BYTES = 1 << 20
_NOT_ITS_OWN = frozenset({errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM})
"""Errors of `open` that say of the entry that it is no file of ours: a link, a socket, one that we may not read."""


class DamagedEntry(Exception):
    """A file that is no entry, or not the one that is wanted; the text says why."""


@dataclass(frozen=True, slots=True)
class Description:
    """Attributes:
    kind: what the value is, such as "executable".
    digest: the key's.
    parts: the key's.
    versions: of the libraries and of this package that wrote it.
    about: what the writer said about the value, as JSON.
    """

    kind: str
    digest: str
    parts: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def entry_name(kind: str, key: Key) -> str:
    """The name of the file.

    Raises:
        ValueError: a kind is a word of small letters.
    """
    if not KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} is no kind: it must be a word of small letters and underscores")
    return f"{key.digest}.{kind}"


def pack(kind: str, key: Key, value: bytes, about: Mapping[str, Any]) -> list[bytes]:
    """The pieces of the entry, in order.

    Raises:
        TypeError, ValueError: `about` cannot be written as JSON, or is longer than a MiB.
    """
    wrote = dict(versions())
    said = {"kind": kind, "key": key.digest, "parts": dict(key.parts), "versions": wrote, "about": dict(about)}
    description = json.dumps(said).encode()
    if len(description) > _MOST_DESCRIPTION_BYTES:
        raise ValueError(f"{len(description)} bytes about a value are too many")
    sizes = _SIZES.pack(MAGIC, FORMAT, len(description), len(value))
    return [sizes, _checksum(sizes, description, value), description, value]


def read_value(path: Path, kind: str, key: Key, most_bytes: int) -> bytes:
    """The value in a file, as it was put there under this kind and key.

    Raises:
        Damaged: what is there is not to be believed.
        FileNotFoundError: there is nothing.
        OSError: it cannot be read now.
    """
    description, value = read_entry(path, most_bytes)
    if (description.kind, description.digest) != (kind, key.digest):
        raise DamagedEntry("it is another entry's")
    return value


def read_entry(path: Path, most_bytes: int) -> tuple[Description, bytes]:
    """What is said about a value, and the value; raises as `read_value` does."""
    handle = _open(path)
    try:
        head, description_bytes, value_bytes = _read_head(handle, most_bytes)
        description = _read(handle, HEAD_BYTES, description_bytes)
        value = _read(handle, HEAD_BYTES + description_bytes, value_bytes)
    finally:
        os.close(handle)
    return _checked(head, description, value)


def unpack(content: bytes) -> tuple[Description, bytes]:
    """What is said about a value, and the value, of an entry's bytes.

    Raises:
        Damaged: they are not to be believed.
    """
    description_bytes, _ = _sizes_of(content[:HEAD_BYTES], len(content), len(content))
    return _checked(content[:HEAD_BYTES], *_cut(content[HEAD_BYTES:], description_bytes))


def unpack_all(content: bytes) -> Iterator[tuple[Description, bytes]]:
    """Entries that stand one behind the other; raises as `unpack` does."""
    start = 0
    while start < len(content):
        head = content[start : start + HEAD_BYTES]
        size = HEAD_BYTES + sum(_parse_head(head))
        yield unpack(content[start : start + size])
        start += size


def read_description(path: Path, most_bytes: int) -> Description:
    """What is said about a value, unchecked; raises as `read_value` does."""
    handle = _open(path)
    try:
        _, description_bytes, _ = _read_head(handle, most_bytes)
        return _parse(_read(handle, HEAD_BYTES, description_bytes))
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    """A handle of the entry's file, which nobody else can have written."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_ITS_OWN:
            raise DamagedEntry(f"it cannot be opened: {error.strerror}") from None
        raise
    status = os.fstat(handle)
    reason = "it is no regular file" if not stat.S_ISREG(status.st_mode) else find_other_writers(status)
    if reason is not None:
        os.close(handle)
        raise DamagedEntry(reason)
    return handle


def _read_head(handle: int, most_bytes: int) -> tuple[bytes, int, int]:
    """The head, and the sizes of the description and the value, which are those of the file."""
    head = _read(handle, 0, HEAD_BYTES)
    return head, *_sizes_of(head, os.fstat(handle).st_size, most_bytes)


def _sizes_of(head: bytes, size: int, most_bytes: int) -> tuple[int, int]:
    """The sizes of the description and the value of an entry of this size."""
    description_bytes, value_bytes = _parse_head(head)
    if size != HEAD_BYTES + description_bytes + value_bytes:
        raise DamagedEntry(f"it has {size} bytes where it says {HEAD_BYTES + description_bytes + value_bytes}")
    if size > most_bytes or description_bytes > _MOST_DESCRIPTION_BYTES:
        raise DamagedEntry(f"its {size} bytes are too many")
    return description_bytes, value_bytes


def _parse_head(head: bytes) -> tuple[int, int]:
    """The sizes of the description and the value, as the head has them."""
    if len(head) < HEAD_BYTES:
        raise DamagedEntry("it is cut short")
    magic, written_format, description_bytes, value_bytes = _SIZES.unpack(head[: _SIZES.size])
    if magic != MAGIC:
        raise DamagedEntry("it is no entry")
    if written_format != FORMAT:
        raise DamagedEntry(f"it is of format {written_format}, not {FORMAT}")
    return description_bytes, value_bytes


def _cut(content: bytes, size: int) -> tuple[bytes, bytes]:
    return content[:size], content[size:]


def _checked(head: bytes, description: bytes, value: bytes) -> tuple[Description, bytes]:
    if _checksum(head[: _SIZES.size], description, value) != head[_SIZES.size :]:
        raise DamagedEntry("its checksum is not that of its content")
    return _parse(description), value


def _read(handle: int, offset: int, size: int) -> bytes:
    content = os.pread(handle, size, offset)
    while len(content) < size and (more := os.pread(handle, size - len(content), offset + len(content))):
        content += more
    if len(content) < size:
        raise DamagedEntry("it is cut short")
    return content


def _checksum(*pieces: bytes) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _parse(description: bytes) -> Description:
    try:
        said = json.loads(description)
        return Description(said["kind"], said["key"], dict(said["parts"]), dict(said["versions"]), dict(said["about"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedEntry("what it says about itself cannot be read") from None
