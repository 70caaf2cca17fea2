"""Cache artifacts of torch: `torch.compiler.save_cache_artifacts` and `load_cache_artifacts`.

Relies on `torch.compiler._cache` (since torch 2.7): an artifact type is registered by name, once per process, and torch
saves the recorded artifacts. If one artifact's type is not registered, torch loads no artifact at all, not even its
own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager


def carry(kind: str, take: Callable[[str, bytes], None]) -> None:
    """Registers an artifact type unless it is registered. torch calls `take` with the key and content of each loaded
    one."""

    class Artifact(CacheArtifact):
        @staticmethod
        def type() -> str:
            return kind

        def populate_cache(self) -> None:
            take(self.key, self.content)

    if kind not in CacheArtifactFactory._artifact_types:
        CacheArtifactFactory.register(Artifact)


def record(kind: str, key: str, content: bytes) -> None:
    """Records an artifact that torch will save; the same key is saved once."""
    # Does not take Dynamo's lock, which torch holds here: each step is atomic in Python, and a thread that captures, and so
    # holds the lock, may wait for the thread that compiles.
    CacheArtifactManager.record_artifact(kind, key, content)
