"""What ops compute for other targets than a CPU: the forms that a program for the CPU leaves out, compiled for it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from jax import lax

from tests.ops.rule_check import Call, assert_all_same

aten = torch.ops.aten
ROWS = torch.randn(6, 30)
POINTS = torch.randn(5, 3), torch.randn(4, 3)
HOLED = torch.where(torch.rand(6, 30) < 0.05, torch.nan, torch.randn(6, 30).round())
CALLS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    *(
        (op, (x, dim))
        for op in (aten.cumsum.default, aten.cumprod.default)
        for x in (ROWS, ROWS.half())
        for dim in (0, 1)
    ),
    *((op, (x, 1)) for op in (aten.cummax.default, aten.cummin.default) for x in (ROWS, HOLED)),
    (aten.logcumsumexp.default, (ROWS, 0)),
    *(
        (op, (x, dim))
        for op in (aten.argmax.default, aten.argmin.default)
        for x in (ROWS, HOLED)
        for dim in (None, 0, 1)
    ),
    *((op, (x, 1)) for op in (aten.max.dim, aten.min.dim) for x in (ROWS, HOLED)),
    *((op, (ROWS, 1)) for op in (aten.median.dim, aten.nanmedian.dim)),
    *((op, (x,)) for op in (aten.median.default, aten.nanmedian.default) for x in (ROWS, HOLED)),
    (aten.kthvalue.default, (ROWS, 3, 0)),
    *((aten._cdist_forward.default, (*POINTS, p, 2)) for p in (0.0, 1.0, 2.0, 3.0, torch.inf)),
    *((aten._cdist_backward.default, (torch.randn(5, 4), *POINTS, p, torch.cdist(*POINTS, p))) for p in (1.0, 3.0)),
    (aten.masked_scatter.default, (ROWS, ROWS > 0, ROWS.abs())),
    (aten.adaptive_max_pool2d.default, (ROWS.view(2, 3, 5, 6), [5, 3])),
)


def in_the_default_form(*operands: jax.Array, default: Callable[..., Any], **_: Any) -> Any:
    return default(*operands)


def test_forms_for_other_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lax, "platform_dependent", in_the_default_form)
    assert_all_same([Call.of(op, *arguments) for op, arguments in CALLS])
