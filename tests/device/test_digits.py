"""The digits example with `.to(device)`: eager's accuracy."""

from __future__ import annotations

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from examples import train_digits
from tests.lists import quick


@pytest.mark.parametrize("name", quick(train_digits.NETS, "conv"))
def test_training_on_digits(name: str, recorder: Recorder) -> None:
    before = recorder.snapshot()
    runs = train_digits.compare(name, train_digits.Digits.load(), 3, "dynaxla")
    after = recorder.snapshot()
    eager, there = runs[f"{name}, eager"], runs[f"{name}, dynaxla"]
    assert abs(eager.accuracy - there.accuracy) <= 0.005
    assert there.losses[-1] < 0.7 * there.losses[0]
    torch.testing.assert_close(torch.tensor(there.losses[:5]), torch.tensor(eager.losses[:5]), rtol=1e-3, atol=1e-4)
    # Adam keeps its counts of steps on the host, unless it is asked to be capturable.
    new = [text for text in after.fallbacks if text not in before.fallbacks]
    assert all("device_state_steps" in text for text in new), new
    assert after.host_ops == before.host_ops
