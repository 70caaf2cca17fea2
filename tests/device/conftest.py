"""The device of the test process: PJRT's CPU, whose tensors lie outside of torch's memory."""

from __future__ import annotations

import pytest
import torch

import dynaxla


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    return dynaxla.use("cpu")
