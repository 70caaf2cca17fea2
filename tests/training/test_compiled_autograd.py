"""Backwards that Dynamo captures as a whole: torch's compiled autograd."""

from __future__ import annotations

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close


def test_numbers_that_autograd_saved_as_tensors(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def accumulate(x: torch.Tensor) -> torch.Tensor:
        for factor in range(3):
            (x * factor).sum().backward()
        assert x.grad is not None
        return x.grad

    monkeypatch.setattr(torch._dynamo.config, "compiled_autograd", True)
    known = len(recorder.snapshot().fallbacks)
    result = torch.compile(accumulate, backend="dynaxla")(torch.ones(3, 4, requires_grad=True))
    assert_close(result, accumulate(torch.ones(3, 4, requires_grad=True)))
    assert len(recorder.snapshot().fallbacks) == known
