"""torch's modules database on the device: results, gradients and buffers beside the host's.

All inputs of all modules are in `python -m conformance.device_sweep modules`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import module_db

from conformance.device_modules import check_module

LEFT_TO_THE_SWEEP = ("nn.LinearCrossEntropyLoss", "nn.Transformer", "nn.CircularPad3d", "nn.TransformerDecoderLayer")
LONG = (
    "nn.TransformerEncoder nn.CircularPad2d nn.LPPool1d nn.LPPool3d nn.RNN nn.LSTM nn.GRU nn.LocalResponseNorm nn.AvgPool3d "
    "nn.FractionalMaxPool3d nn.LazyConv3d nn.LazyConvTranspose3d nn.Conv3d nn.ConvTranspose3d nn.CTCLoss "
    "nn.AdaptiveMaxPool3d nn.FractionalMaxPool2d nn.MultiheadAttention nn.CosineEmbeddingLoss nn.GaussianNLLLoss"
).split()
"""Modules of many ops, and those that others stand for."""
ON_HOST = {
    "nn.FractionalMaxPool3d": "aten.fractional_max_pool3d.default",
    "nn.MultiLabelMarginLoss": "aten.multilabel_margin_loss_backward.default",
    "nn.MultiMarginLoss": "aten.multi_margin_loss_backward.default",
    "nn.CTCLoss": "aten._ctc_loss.default aten._ctc_loss_backward.default",
}
"""Modules of which a part runs on the host, and that part."""


def _cases() -> list[object]:
    """Each module's first input, in evaluation too where that computes something else."""
    cases = []
    for info in (info for info in module_db if info.name not in LEFT_TO_THE_SWEEP):
        marks = (pytest.mark.long,) if info.name in LONG else ()
        for training in (True, False) if info.train_and_eval_differ else (True,):
            name = f"{info.name}, {'training' if training else 'evaluation'}"
            cases.append(pytest.param(info, training, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("info", "training"), _cases())
def test_a_module_is_eagers(info: Any, training: bool) -> None:
    status, detail = check_module(info, torch.float32, training, most=1)
    assert status in ("right", "host"), detail
    assert status == "right" or detail == ON_HOST.get(info.name)
