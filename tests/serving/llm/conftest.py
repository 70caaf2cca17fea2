"""One device for the process, and an engine of a small Llama for most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dynaxla
from dynaxla.serving.llm.engine import LanguageEngine
from tests.serving.llm.small import Served, served


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    dynaxla.use("cpu")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """Nothing is reset while an engine runs: its thread may be in code that Dynamo drops, of which the process dies."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _fresh_dynamo_for_a_file() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def llama() -> Iterator[Served]:
    with served("llama") as found:
        yield found


@pytest.fixture
def engine(llama: Served) -> LanguageEngine:
    return llama.engine
