"""torch's modules database on the device: results, gradients and buffers beside the host's.

All inputs of all modules are in `python -m benchmarks.device_sweep modules`.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_modules import module_db

from benchmarks.device_modules import check_module

MOST = 2  # inputs of a module

ON_HOST = {
    "nn.FractionalMaxPool3d": "aten.fractional_max_pool3d.default",
    "nn.MultiLabelMarginLoss": "aten.multilabel_margin_loss_backward.default",
    "nn.MultiMarginLoss": "aten.multi_margin_loss_backward.default",
    "nn.CTCLoss": "aten._ctc_loss.default aten._ctc_loss_backward.default",
    "nn.LinearCrossEntropyLoss": "aten.masked_select.default",
}
"""Modules of which a part runs on the host, and that part."""


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_is_eagers(info: object, training: bool) -> None:
    status, detail = check_module(info, torch.float32, training, MOST)
    assert status in ("right", "host"), detail
