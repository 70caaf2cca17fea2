"""Compiled backwards of the device leave out what nothing is differentiated of, as the host's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close
from tests.training.test_undefined_gradients import FUNCTIONS, USES, find_gradients


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_the_hosts(function: Callable[..., Any], recorder: Recorder) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -0.0], [1.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    compiled = torch.compile(function, backend="dynaxla", dynamic=False)
    for used in USES:
        expected = find_gradients(function, [x, x.flip(0)], used)
        with recorder.expect(eager_ops=0):
            made = find_gradients(compiled, [x.to("dynaxla"), x.flip(0).to("dynaxla")], used)
        for mine, eagers in zip(made, expected, strict=True):
            assert (mine is None) == (eagers is None)
            if mine is not None and eagers is not None:
                assert_close(mine.cpu(), eagers)
