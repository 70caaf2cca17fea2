"""Bytes that say with which versions they were written, and that are read only if they are as they were."""

from __future__ import annotations

import hashlib
import json

from dynaxla.cache.environment_key import versions
from dynaxla.errors import PackageError

_MAGIC = b"dynaxla\x01"
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_TELLING = ("torch", "jaxlib", "dynaxla")
"""Others may change in between: what is written neither holds nor needs what torch-mlir makes."""


def sealed(content: bytes) -> bytes:
    """The content with the versions that wrote it and a checksum of all."""
    head = json.dumps({name: versions()[name] for name in _TELLING}).encode()
    body = len(head).to_bytes(4, "big") + head + content
    return _MAGIC + hashlib.sha256(body).digest() + body


def unsealed(data: bytes) -> bytes:
    """The content.

    Raises:
        PackageError: it is no such thing, a byte of it is another one, or other versions wrote it.
    """
    start = len(_MAGIC) + _CHECKSUM_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC):
        raise PackageError("this is nothing that dynaxla saved", "save it anew")
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise PackageError("what was saved is damaged: its checksum is another one", "save it anew")
    length = int.from_bytes(body[:4], "big")
    wrote, here = json.loads(body[4 : 4 + length]), versions()
    pairs = {name: (str(wrote.get(name)), str(here.get(name))) for name in _TELLING}
    other = [f"{name} {its[:12]}, here {own[:12]}" for name, (its, own) in pairs.items() if its != own]
    if other:
        raise PackageError(f"it was saved with other versions: {'; '.join(other)}", "save it anew with those here")
    return body[4 + length :]
