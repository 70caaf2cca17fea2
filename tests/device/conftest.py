"""The device of the test process: PJRT's CPU, whose tensors lie outside of torch's memory, or what DYNAXLA_PLATFORM says.

`tests/plugin` runs these tests again on a device that has memory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import dynaxla
from dynaxla.device.registration import PLATFORM_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def device() -> Iterator[torch.device]:
    with pytest.MonkeyPatch.context() as patch:  # the children of tests have the same device
        patch.setenv(PLATFORM_VARIABLE, os.environ.get(PLATFORM_VARIABLE, "cpu"))
        yield dynaxla.use()
