"""torch's carrier of caches: `torch.compiler.save_cache_artifacts` and `load_cache_artifacts`.

Relies on `torch.compiler._cache` (since torch 2.7): a type of artifact is registered by name, once per process, and what is
recorded is what is saved. An artifact whose type is not registered makes torch load nothing at all, not even its own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager


def carry(kind: str, take: Callable[[str, bytes], None]) -> None:
    """Registers a type of artifact, unless it is registered. `take` is given the key and content of each that is loaded."""

    class Artifact(CacheArtifact):
        @staticmethod
        def type() -> str:
            return kind

        def populate_cache(self) -> None:
            take(self.key, self.content)

    if kind not in CacheArtifactFactory._artifact_types:
        CacheArtifactFactory.register(Artifact)


def record(kind: str, key: str, content: bytes) -> None:
    """Adds to what torch saves; the same key is saved once."""
    # Without Dynamo's lock, which torch records under: each of the steps is one of Python's, and a thread that captures may
    # wait for the one that compiles.
    CacheArtifactManager.record_artifact(kind, key, content)
