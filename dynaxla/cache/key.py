"""Keys of what is kept: a digest of named parts, of which no two different lists have the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class Key:
    """What a stored value was made of.

    Attributes:
        digest: SHA-256 of all parts and their names, in hexadecimal digits.
        parts: of each part its name and the first 16 digits of a digest of its own, which say why two keys differ.
    """

    digest: str
    parts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, **parts: object) -> Key:
        """The key of these parts, in whatever order they are given.

        Parts are None, numbers, texts, bytes, paths, enums, and tuples, lists, sets, mappings and dataclasses of such. A class
        counts by its name.

        Raises:
            TypeError: a part is of another kind: what it is made of is not known.
        """
        named = [(name, _encode(part)) for name, part in sorted(parts.items())]
        digest = hashlib.sha256(_sequence(b"K", [_text(b"s", name) + part for name, part in named]))
        return cls(digest.hexdigest(), tuple((name, hashlib.sha256(part).hexdigest()[:16]) for name, part in named))


def _encode(part: object) -> bytes:  # noqa: C901 - a line for each kind
    """A tag, a length, the content: no encoding is the beginning of another one."""
    match part:
        case None:
            return b"n"
        case Enum():
            return _sequence(b"e", [_name(part), _text(b"s", part.name)])
        case bool():
            return b"t" if part else b"f"
        case int():
            return _text(b"i", str(int(part)))
        case float():
            return b"d" + struct.pack(">d", part)
        case str():
            return _text(b"s", part)
        case PurePath():
            return _text(b"p", str(part))
        case bytes() | bytearray() | memoryview():
            return b"b" + hashlib.sha256(part).digest()
        case tuple() | list():
            return _sequence(b"l" if isinstance(part, list) else b"r", [_encode(each) for each in part])
        case Set():
            return _sequence(b"u", sorted(_encode(each) for each in part))
        case Mapping() if all(type(name) is str is type(value) for name, value in part.items()):
            return _encode_texts(tuple(part.items()))
        case Mapping():
            return _sequence(b"m", sorted(_encode(name) + _encode(value) for name, value in part.items()))
        case _ if is_dataclass(part) and not isinstance(part, type):
            held = [_text(b"s", field.name) + _encode(getattr(part, field.name)) for field in fields(part)]
            return _sequence(b"c", [_name(part), *held])
    raise TypeError(f"{type(part).__qualname__} {part!r} cannot be part of a key")


@lru_cache(64)
def _encode_texts(entries: tuple[tuple[str, str], ...]) -> bytes:
    """A mapping of texts to texts: versions and settings, which stand in the key of each program of a process."""
    return _sequence(b"m", sorted(_text(b"s", name) + _text(b"s", value) for name, value in entries))


def _sequence(tag: bytes, entries: Sequence[bytes]) -> bytes:
    return tag + struct.pack(">Q", len(entries)) + b"".join(entries)


def _text(tag: bytes, text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return tag + struct.pack(">Q", len(content)) + content


def _name(part: object) -> bytes:
    return _text(b"q", f"{type(part).__module__}.{type(part).__qualname__}")
