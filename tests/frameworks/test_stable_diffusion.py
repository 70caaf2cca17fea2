"""diffusers' pipelines, unchanged, around compiled networks: eager's images, one executable a network."""

from __future__ import annotations

import pytest

from dynaxla.observe.recorder import Recorder
from examples import stable_diffusion
from tests.lists import quick


@pytest.mark.long
@pytest.mark.parametrize(
    ("title", "networks"), quick([("stable diffusion", 3), ("stable diffusion xl", 4)], ("stable diffusion", 3))
)
def test_images(title: str, networks: int, recorder: Recorder) -> None:
    before = recorder.snapshot()
    with recorder.expect(graphs=networks, compiles=networks, eager_ops=0):
        assert stable_diffusion.compare(title, stable_diffusion.PIPELINES[title], steps=20) < 1e-4
    assert recorder.snapshot().exact_shapes == before.exact_shapes
