"""Ops that torch calls itself are compiled where a program calls them directly."""

from __future__ import annotations

import torch
from torch import Tensor

import dynaxla
from tests.tolerances import assert_close

aten = torch.ops.aten


def test_a_convolution_with_eagers_choice_of_library() -> None:
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(4, 3, 3), torch.randn(4)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return aten._convolution(x, weight, bias, [2], [1], [1], False, [0], 1, False, False, True, True)

    before = dynaxla.read_metrics()
    assert_close(torch.compile(run, backend="dynaxla")(x, weight), run(x, weight))
    assert dynaxla.read_metrics().eager_ops == before.eager_ops


def test_its_gradient() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(4, 3, 3, requires_grad=True)

        def run(x: Tensor, weight: Tensor) -> Tensor:
            return aten._convolution(x, weight, None, [1], [1], [1], False, [0], 1, False, False, True, True).relu()

        (torch.compile(run, backend="dynaxla") if compiled else run)(x, weight).sum().backward()
        results.append((x.grad, weight.grad))
    for mine, eager in zip(results[1], results[0], strict=True):
        assert mine is not None
        assert eager is not None
        assert_close(mine, eager)


def test_an_unchecked_write_by_index() -> None:
    x, places, values = torch.randn(6, 2), torch.tensor([0, 3, 3, -1]), torch.randn(4, 2)

    def run(x: Tensor, places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        added = aten._index_put_impl(x, [places], values, True, True)
        return added, aten._index_put_impl_(x.clone(), [None, places[:1]], values[:1, :1])

    before = dynaxla.read_metrics()
    for mine, eager in zip(
        torch.compile(run, backend="dynaxla")(x, places, values), run(x, places, values), strict=True
    ):
        assert_close(mine, eager)
    assert dynaxla.read_metrics().eager_ops == before.eager_ops
