"""Every test starts with a clean Dynamo and reads compile counts from the process's recorder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dynaxla
from dynaxla.metrics.recorder import Recorder


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def recorder() -> Recorder:
    return dynaxla.recorder()
