"""Numbers of Python's `random` in a compiled function: eager's numbers, in eager's precision."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close
from tests.torch_api.boundary import boundary


def _draw(x: Tensor) -> tuple[Any, ...]:
    scale = random.uniform(0, 2)
    return x + random.uniform(3, 9), random.randint(1, 5) * x, scale, x.sin() * scale, 2 * scale


@boundary("random_numbers.take_full_precision")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_random_numbers_are_drawn_at_every_call(dtype: torch.dtype, dynamic: bool, recorder: Recorder) -> None:
    compiled, before = torch.compile(_draw, backend="dynaxla", dynamic=dynamic), recorder.snapshot().compiles
    for size in (3, 5, 7) if dynamic else (3, 3, 3):
        x = torch.arange(1, size + 1).to(dtype)
        state = random.getstate()
        expected = _draw(x)
        random.setstate(state)
        for given, wanted in zip(compiled(x), expected, strict=True):
            if isinstance(wanted, Tensor):
                assert_close(given, wanted)
            else:
                assert given == wanted
    assert recorder.snapshot().compiles - before <= 2


@torch.no_grad()
def test_layers_that_are_left_out_at_random() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            if random.uniform(0, 1) > 0.5:
                x = layer(x)
        return x

    compiled, x = torch.compile(forward, backend="dynaxla"), torch.randn(2, 4)
    for seed in range(3):
        random.seed(seed)
        expected = forward(x)
        random.seed(seed)
        assert_close(compiled(x), expected)
