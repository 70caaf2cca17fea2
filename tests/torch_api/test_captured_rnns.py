"""Recurrent modules are captured for this backend, and others see Dynamo's default."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

from dynaxla.torch_api import captured_functions
from tests.torch_api.boundary import boundary


@boundary("captured_functions.capture_rnns", "captured_functions.RNN_OPS")
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_other_backends_see_the_default(make: type[nn.Module]) -> None:
    module, x = make(3, 4), torch.randn(5, 2, 3)
    captured_functions.capture_rnns()
    torch.compile(module, backend="dynaxla", fullgraph=True)(x)
    assert not torch._dynamo.config.allow_rnn
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="RNN, GRU, or LSTM"):
        torch.compile(module, backend="eager", fullgraph=True)(x)
    with torch._dynamo.config.patch(allow_rnn=True):
        assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x)[0], module(x)[0])


@boundary("captured_functions.capture_rnns")
def test_kernels_of_torch_stay() -> None:
    op = torch.ops.aten.lstm.input
    before = dict(op.py_kernels)
    torch.compile(nn.LSTM(3, 4), backend="dynaxla", fullgraph=True)(torch.randn(5, 2, 3))
    assert op.py_kernels == before
