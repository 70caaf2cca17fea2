"""The digits example: eager's accuracy on real images, and few executables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from examples import train_digits
from tests.lists import quick


@pytest.mark.long
@pytest.mark.parametrize("name", quick(train_digits.NETS, "conv"))
def test_training_on_digits(name: str, recorder: Recorder, tmp_path: Path) -> None:
    digits = train_digits.Digits.load()
    assert len(digits.images) % train_digits.BATCH, "the last batch is smaller"
    before = recorder.snapshot()
    runs = train_digits.compare(name, digits, epochs=3)
    after = recorder.snapshot()
    eager, compiled = runs[f"{name}, eager"], runs[f"{name}, dynaxla"]
    assert abs(eager.accuracy - compiled.accuracy) <= 0.005
    assert compiled.losses[-1] < 0.7 * compiled.losses[0]
    torch.testing.assert_close(torch.tensor(compiled.losses[:5]), torch.tensor(eager.losses[:5]), rtol=1e-3, atol=1e-4)
    assert after.fallbacks == before.fallbacks
    assert after.compiles - before.compiles <= 2 * (after.graphs - before.graphs)
    train_digits.plot(runs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 5000
