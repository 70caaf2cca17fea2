"""One device for the process, and an engine of a small Llama for most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dynaxla
from dynaxla.serving.llm.engine import LanguageEngine
from tests.serving.llm.small import Served, served


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    dynaxla.use("cpu")


@pytest.fixture(scope="module")
def llama() -> Iterator[Served]:
    with served("llama") as found:
        yield found


@pytest.fixture
def engine(llama: Served) -> LanguageEngine:
    return llama.engine
