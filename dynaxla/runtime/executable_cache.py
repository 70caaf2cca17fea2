"""Executables on disk, for later processes; and in torch's artifacts, for other machines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dynaxla.cache.entry import DamagedEntry, pack, unpack
from dynaxla.cache.environment_key import Environment
from dynaxla.cache.key import Key
from dynaxla.cache.kinds import EXECUTABLE, METADATA
from dynaxla.cache.store import Store, open_store
from dynaxla.errors import CompileError, CompileUnavailable, PackageError
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.runtime.client import Client, Executable
from dynaxla.runtime.packaged_programs import PackagedPrograms, environment_of
from dynaxla.torch_api.artifacts import carry, record

logger = logging.getLogger("dynaxla")

Find = Callable[[], Executable | None]
Make = Callable[[Key | None], Executable]

KIND = EXECUTABLE.name
ARTIFACT = f"dynaxla_{KIND}"


@dataclass(frozen=True, slots=True)
class ExecutableCache:
    """Executables of a client, by key.

    Attributes:
        store: on disk; None: nothing is stored.
        bundle: the programs of a package, which is read first and is given what is found or compiled; None: there is none.
        recorder: counts what is found in the package, and the seconds of loading.
    """

    store: Store | None
    bundle: PackagedPrograms | None = None
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def active(self) -> bool:
        """Whether anything is stored at all."""
        return self.store is not None or self.bundle is not None

    def environment(self, client: Client) -> Environment:
        """That of this process, or of the one that made the package."""
        return environment_of(client) if self.bundle is None else self.bundle.settle(client)

    def check_compilable(self) -> None:
        """Raises PackageError if there is a package, and nothing that could compile what it lacks."""
        if self.bundle is not None:
            self.bundle.check_compilable()

    def find(self, key: Key, client: Client, partitions: int = 1) -> Executable | None:
        """The executable that is stored under a key, loaded on so many devices.

        Raises:
            PackageError: that of the package cannot be loaded.
        """
        packaged = self._find_packaged(KIND, key)
        if packaged is not None:
            try:
                return self._load(client, packaged, partitions)
            except CompileUnavailable:
                raise
            except CompileError as error:
                raise PackageError(f"a program of the package is not used: {error}", "make the package anew") from error
        serialized = None if self.store is None else self.store.get(KIND, key)
        if self.store is None or serialized is None:
            return None
        try:
            executable = self._load(client, serialized, partitions)
        except CompileUnavailable:
            raise
        except CompileError as error:
            logger.warning("an executable in the cache is not used, and compiled anew: %s", error)
            self.store.reject(KIND, key)
            return None
        self._record(key, serialized)
        if self.bundle is not None:
            self.bundle.entries.put(KIND, key, serialized)
        return executable

    def share(self, key: Key | None, find: Find, make: Make, wait_s: float) -> Executable:
        """Finds an executable, or makes it once for all processes that want it now: the others wait, and find it.

        Args:
            key: None: nothing is known by which others could find it.
            find: looks for it on disk.
            make: compiles and stores it under the key.
            wait_s: nobody waits for longer.
        """
        found = find()
        if found is not None or key is None or self.store is None:
            return found or make(key)
        with self.store.claim(KIND, key, wait_s) as is_there:
            return (find() if is_there else None) or make(key)

    def compile(
        self, key: Key | None, client: Client, module: bytes, limits: Limits, partitions: int = 1
    ) -> tuple[Executable, float]:
        """Compiles a StableHLO module, and stores it under a key if its platform can serialize it; gives XLA's seconds, too.

        Raises:
            CompileError: see `Client.compile`.
        """
        started = time.perf_counter()
        executable = client.compile(module, limits, partitions)
        compile_s = time.perf_counter() - started
        if key is not None:
            self.put(key, executable, compile_s)
        return executable, compile_s

    def put(self, key: Key, executable: Executable, compile_s: float) -> None:
        """Stores an executable, where its platform can serialize it."""
        serialized = executable.serialize() if self.active else None
        if serialized is not None and self.bundle is not None:
            self.bundle.entries.put(KIND, key, serialized)
        if self.store is not None and serialized is not None:
            self.store.put(KIND, key, serialized, {"compile_s": round(compile_s, 3)})
            self._record(key, serialized)

    def find_metadata(self, key: Key) -> bytes | None:
        """What is stored of a program beside its executable."""
        packaged = self._find_packaged(METADATA.name, key)
        if packaged is not None:
            return packaged
        found = None if self.store is None else self.store.get(METADATA.name, key)
        if found is not None and self.bundle is not None:
            self.bundle.entries.put(METADATA.name, key, found)
        return found

    def put_metadata(self, key: Key, metadata: bytes) -> None:
        """Stores what is to know of a program beside its executable, which is stored already."""
        for place in (self.store, None if self.bundle is None else self.bundle.entries):
            if place is not None:
                place.put(METADATA.name, key, metadata)

    def _find_packaged(self, kind: str, key: Key) -> bytes | None:
        if self.bundle is None:
            return None
        found = self.bundle.entries.get(kind, key)
        amounts = {"misses": 1} if found is None else {"hits": 1, "read_bytes": len(found)}
        self.recorder.count_cache("package", **amounts)
        return found

    def _load(self, client: Client, serialized: bytes, partitions: int) -> Executable:
        started = time.perf_counter()
        executable = client.load(serialized, partitions)
        self.recorder.add(loading_s=time.perf_counter() - started)
        return executable

    def _record(self, key: Key, serialized: bytes) -> None:
        carry_executables()
        # XLA dies of some damaged executables, and gives wrong numbers of others; torch has no checksums, and an entry has.
        record(ARTIFACT, key.digest, b"".join(pack(KIND, key, serialized, {})))


def carry_executables() -> None:
    """Makes executables part of what `torch.compiler.save_cache_artifacts` saves and `load_cache_artifacts` loads."""
    carry(ARTIFACT, _take)


def _take(digest: str, content: bytes) -> None:
    """Stores an executable that came with torch's artifacts, as an entry."""
    try:
        description, serialized = unpack(content)
        if (description.kind, description.digest) != (KIND, digest):
            raise DamagedEntry("it is another entry's")
    except DamagedEntry as damage:
        logger.warning("an executable among torch's cache artifacts is damaged, and left out: %s", damage)
        return
    store = open_store()
    if store is not None:
        store.put(KIND, Key(digest), serialized, {"from": "torch's cache artifacts"})
