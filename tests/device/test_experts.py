"""What mixtures of experts call on accelerators: counts of integers, and products in groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.observe.recorder import Recorder


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("given", [(8, 0, 7), (5, 0, 0), (7, -3, 40), (3, 4, 4), (9, 2.7, 9.9)], ids=str)
def test_histograms_of_integers(dtype: torch.dtype, given: tuple[Any, ...], recorder: Recorder) -> None:
    """Eager on the host counts floats alone; its ranges are of the tensor's dtype."""
    x = torch.randint(0, 20, (3, 33)).to(dtype)
    bins, low, high = given
    before = recorder.snapshot()
    found = torch.histc(x.to("dynaxla"), bins, low, high).cpu()
    assert recorder.snapshot().host_ops == before.host_ops
    assert found.dtype is dtype
    assert torch.equal(found.double(), torch.histc(x.double(), bins, int(low), int(high)))


def test_histograms_of_one_value_and_of_none() -> None:
    assert torch.histc(torch.full((4,), 3, device="dynaxla"), 4).tolist() == [0, 0, 4, 0]
    assert torch.histc(torch.empty(0, dtype=torch.int32, device="dynaxla"), 4).tolist() == [0] * 4
    with pytest.raises(NotImplementedError, match="Bool"):
        torch.histc(torch.zeros(4, dtype=torch.bool, device="dynaxla"), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_in_groups(dtype: torch.dtype, recorder: Recorder) -> None:
    offs = torch.tensor([3, 3, 12], dtype=torch.int32)
    given = torch.randn(12, 16).to(dtype), torch.randn(3, 16, 8).to(dtype), torch.randn(12, 8).to(dtype)
    before = recorder.snapshot()
    found = grouped(*(x.to("dynaxla") for x in given), offs.to("dynaxla"))
    assert recorder.snapshot().host_ops == before.host_ops
    for mine, wanted in zip(found, grouped(*given, offs), strict=True):
        torch.testing.assert_close(mine.cpu(), wanted)


def grouped(rows: torch.Tensor, matrices: torch.Tensor, grad: torch.Tensor, offs: torch.Tensor) -> list[torch.Tensor]:
    """The product, and the gradients of rows and matrices."""
    leaves = [x.clone().requires_grad_() for x in (rows, matrices)]
    product = torch._grouped_mm(*leaves, offs=offs)
    return [product.detach(), *torch.autograd.grad(product, leaves, grad)]


def test_wrong_products_are_eagers_errors() -> None:
    offs = torch.tensor([3, 3, 12], dtype=torch.int32, device="dynaxla")
    with pytest.raises(RuntimeError, match="contraction dimension"):
        torch._grouped_mm(torch.randn(12, 15, device="dynaxla"), torch.randn(3, 16, 8, device="dynaxla"), offs=offs)
