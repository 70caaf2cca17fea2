"""Tests on an NVIDIA GPU: of torch's own CUDA tensors, which the backend computes on by JAX's CUDA plugin.

They are skipped where there is none. `DYNAXLA_PLATFORM=cuda python -m pytest tests/device` runs the device's tests on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU, or torch is built without CUDA")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _float32_is_float32() -> Iterator[None]:
    """torch's convolutions round float32 to TF32 on a GPU unless they are told not to."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
