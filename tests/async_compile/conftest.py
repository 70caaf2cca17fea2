"""What tests of compiles in the background share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynaxla.runtime_state import process
from tests.async_compile.ended import until
from tests.bucketing.poison import poison


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Padding holds junk, and what one test wanted is not counted by the next."""
    poison(monkeypatch)
    yield
    until(lambda: process().compile_service.idle)
