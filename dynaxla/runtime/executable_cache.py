"""Executables on disk, for later processes; and in torch's artifacts, for other machines."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from dynaxla.cache.key import Key
from dynaxla.cache.store import Store, open_store
from dynaxla.errors import CompileError, CompileUnavailable, PackageError
from dynaxla.runtime.client import Client, Executable
from dynaxla.runtime.packaged_programs import Bundle, Surroundings
from dynaxla.torch_api.artifacts import carry, record

logger = logging.getLogger("dynaxla")

KIND = "executable"
OUTLINE = "outline"
ARTIFACT = f"dynaxla_{KIND}"
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class KeptExecutables:
    """Attributes:
    store: where they are kept; None: nowhere.
    bundle: the programs of a package, which is looked into first, and is given what is found or made; None: there is none.
    """

    store: Store | None
    bundle: Bundle | None = None

    @property
    def active(self) -> bool:
        """Whether anything is kept at all."""
        return self.store is not None or self.bundle is not None

    def surroundings(self, client: Client) -> Surroundings:
        """What keys say of this process, or of the one that made the package."""
        return Surroundings.here(client) if self.bundle is None else self.bundle.settled(client)

    def check_compilable(self) -> None:
        """Raises PackageError if there is a package, and nothing that could compile what it lacks."""
        if self.bundle is not None:
            self.bundle.check_compilable()

    def find(self, key: Key, client: Client) -> Executable | None:
        """The executable that was kept under a key, loaded.

        Raises:
            PackageError: that of the package cannot be loaded.
        """
        if self.bundle is not None and key.digest in self.bundle.programs:
            try:
                return client.load(self.bundle.programs[key.digest])
            except CompileUnavailable:
                raise
            except CompileError as error:
                raise PackageError(f"a program of the package is not used: {error}", "make the package anew") from error
        serialized = None if self.store is None else self.store.get(KIND, key)
        if self.store is None or serialized is None:
            return None
        try:
            executable = client.load(serialized)
        except CompileUnavailable:
            raise
        except CompileError as error:
            logger.warning("an executable in the cache is not used, and compiled anew: %s", error)
            self.store.reject(KIND, key)
            return None
        self._record(key, serialized)
        if self.bundle is not None:
            self.bundle.programs[key.digest] = serialized
        return executable

    def keep(self, key: Key, executable: Executable, compile_s: float) -> None:
        """Keeps an executable, where its platform can serialize it."""
        serialized = executable.serialized() if self.active else None
        if serialized is not None and self.bundle is not None:
            self.bundle.programs[key.digest] = serialized
        if self.store is not None and serialized is not None:
            self.store.put(KIND, key, serialized, {"compile_s": round(compile_s, 3)})
            self._record(key, serialized)

    def find_outline(self, key: Key) -> bytes | None:
        """What is known of a program beside its executable."""
        if self.bundle is not None and key.digest in self.bundle.outlines:
            return self.bundle.outlines[key.digest]
        outline = None if self.store is None else self.store.get(OUTLINE, key)
        if outline is not None and self.bundle is not None:
            self.bundle.outlines[key.digest] = outline
        return outline

    def keep_outline(self, key: Key, outline: bytes) -> None:
        """Keeps what is known of a program beside its executable, which is kept already."""
        if self.bundle is not None:
            self.bundle.outlines[key.digest] = outline
        if self.store is not None:
            self.store.put(OUTLINE, key, outline, {})

    def _record(self, key: Key, serialized: bytes) -> None:
        carry_executables()
        # XLA dies of some damaged executables, and gives wrong numbers of others; torch has no checksums.
        record(ARTIFACT, key.digest, hashlib.sha256(serialized).digest() + serialized)


def carry_executables() -> None:
    """Makes executables part of what `torch.compiler.save_cache_artifacts` saves and `load_cache_artifacts` loads."""
    carry(ARTIFACT, _take)


def _take(digest: str, content: bytes) -> None:
    checksum, serialized = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    store = open_store()
    if hashlib.sha256(serialized).digest() != checksum:
        logger.warning("an executable among torch's cache artifacts is damaged, and left out")
    elif store is not None:
        store.put(KIND, Key(digest), serialized, {"from": "torch's cache artifacts"})
