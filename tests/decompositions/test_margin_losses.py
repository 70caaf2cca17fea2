"""Margin losses and their gradients are eager's: labels that end early, and values that lie on the margin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynaxla
from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.tolerances import assert_close

Loss = Callable[..., Tensor]
LABELS = torch.tensor([[3, 0, -1, 1, 1], [-1, 0, 0, 0, 0], [4, 1, 2, 3, 0], [2, 2, -1, -1, -1]])


@pytest.mark.parametrize("reduction", quick(["mean", "sum", "none"], "mean"))
@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize(
    "settings", [None, {}, {"p": 2}, {"margin": 0.5, "weight": torch.tensor([0.5, 1.0, 2.0, 1.0, 0.0])}], ids=str
)
def test_as_eager(settings: dict[str, Any] | None, rows: int | None, reduction: str, recorder: Recorder) -> None:
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (4, 5)).float()
    labels = LABELS if settings is None else torch.tensor([2, 0, 4, 1])

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        if settings is None:
            return F.multilabel_margin_loss(x, labels, reduction=reduction)
        return F.multi_margin_loss(x, labels, reduction=reduction, **settings)

    x, labels = (x, labels) if rows else (x[0], labels[0])
    results = []
    before = recorder.snapshot()
    for run in (loss, torch.compile(loss, backend="dynaxla")):
        given = x.clone().requires_grad_()
        value = run(given, labels)
        value.sum().backward()
        assert given.grad is not None
        results.append((value.detach(), given.grad, run(x, labels)))
    for wanted, mine in zip(*results, strict=True):
        assert_close(mine, wanted)
    assert recorder.snapshot().eager_ops == before.eager_ops


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_of_a_single_value(reduction: str) -> None:
    x, label = torch.tensor(0.3), torch.tensor(0)
    for loss in (F.multilabel_margin_loss, F.multi_margin_loss):
        assert_close(
            torch.compile(loss, backend="dynaxla")(x, label, reduction=reduction), loss(x, label, reduction=reduction)
        )


Sizes = tuple[tuple[int, ...], tuple[int, ...]]
REFUSED: tuple[tuple[Loss, Sizes], ...] = (
    *((loss, ((0,), (10,))) for loss in (F.multi_margin_loss, F.multilabel_margin_loss)),
    *((loss, ((10, 0), (10, 0))) for loss in (F.multi_margin_loss, F.multilabel_margin_loss)),
    *((loss, ((2, 3, 4), (2,))) for loss in (F.multi_margin_loss, F.multilabel_margin_loss)),
    (F.multi_margin_loss, ((4, 5), (3,))),
    (F.multi_margin_loss, ((4, 5), (4, 5))),
    (F.multilabel_margin_loss, ((4, 5), (4,))),
    (F.multilabel_margin_loss, ((5,), (4,))),
)


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
@pytest.mark.parametrize(("loss", "sizes"), REFUSED, ids=lambda given: getattr(given, "__name__", None) or str(given))
def test_sizes_that_eager_refuses_raise(loss: Loss, sizes: Sizes, device: str) -> None:
    dynaxla.use("cpu")
    x, labels = torch.zeros(sizes[0]), torch.zeros(sizes[1], dtype=torch.int64)
    with pytest.raises(RuntimeError):
        loss(x, labels)
    run = torch.compile(loss, backend="dynaxla") if device == "cpu" else loss
    with pytest.raises(RuntimeError, match=r"Expected|inconsistent"):
        run(x.to(device), labels.to(device))


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
@pytest.mark.parametrize(
    ("loss", "labels"), [(F.multi_margin_loss, (0,)), (F.multilabel_margin_loss, (0, 5))], ids=["multi", "multilabel"]
)
def test_of_an_empty_batch(loss: Loss, labels: tuple[int, ...], device: str) -> None:
    dynaxla.use("cpu")

    def losses(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss(x, labels, reduction="none"), loss(x, labels, reduction="sum")

    run = torch.compile(losses, backend="dynaxla") if device == "cpu" else losses
    x = torch.zeros(0, 5).to(device).requires_grad_()
    each, total = run(x, torch.zeros(labels, dtype=torch.int64).to(device))
    (each.sum() + total).backward()
    assert each.shape == (0,)
    assert total.item() == 0
    assert x.grad is not None
    assert x.grad.shape == (0, 5)
