"""diffusers' pipeline, moved by `.to`: the host's images for the same latents, op by op and with a compiled UNet."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from dynaxla.observe.recorder import Recorder
from examples import stable_diffusion

STEPS = 4
HOST_OPS = {"aten.nonzero.default"}
"""Where the scheduler looks for its first step: a result whose size depends on values."""


def test_images(recorder: Recorder) -> None:
    wanted, _ = stable_diffusion.draw(stable_diffusion.small(), STEPS)
    before = Counter(recorder.snapshot().host_ops)
    pipeline = stable_diffusion.small().to("dynaxla")
    assert pipeline.device.type == "dynaxla"
    found, _ = stable_diffusion.draw(pipeline, STEPS)
    assert np.abs(found - wanted).max() < 1e-4
    assert set(Counter(recorder.snapshot().host_ops) - before) <= HOST_OPS
    pipeline.unet = torch.compile(pipeline.unet, backend="dynaxla")
    with recorder.expect(graphs=1, eager_ops=0):
        found, told = stable_diffusion.draw(pipeline, STEPS)
    assert np.abs(found - wanted).max() < 1e-4
    assert told == list(range(STEPS))
    with recorder.expect(compiles=0):
        stable_diffusion.draw(pipeline, STEPS)
