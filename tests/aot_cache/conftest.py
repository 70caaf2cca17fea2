"""Caches of a test's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.aot_cache import cached_graph
from dynaxla.cache.store import Store
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.ops.table import OpRegistry, core_table
from dynaxla.runtime.executable_cache import ExecutableCache


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of torch's cache, in which nothing is."""
    own = dataclasses.replace(
        shared.process(),
        executables=ExecutableCache(Store(tmp_path / "own")),
        functions=FunctionTable(),
        registered=OpRegistry(core_table()),  # whatever other tests registered
    )
    monkeypatch.setattr(backend, "process", lambda: own)
    monkeypatch.setattr(cached_graph, "shared_here", lambda: own)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return tmp_path / "torch" / "aotautograd"
