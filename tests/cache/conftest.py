"""A store of the test's own, and a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaxla.cache.key import Key
from dynaxla.cache.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def key() -> Key:
    return Key.of(module=b"a module")
