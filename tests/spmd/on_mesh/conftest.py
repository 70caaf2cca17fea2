"""The device of a process of its own: eight devices of the CPU. `tests/spmd/test_on_mesh.py` starts it."""

from __future__ import annotations

import pytest
import torch

import dynaxla
from dynaxla.mesh import Mesh


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    return dynaxla.use("cpu", devices=8)


@pytest.fixture
def mesh() -> Mesh:
    """Two by four."""
    return dynaxla.make_mesh((2, 4), ("data", "model"))
