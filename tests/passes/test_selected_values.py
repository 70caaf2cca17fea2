"""What is compared with a selection of itself: the same numbers stand on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.custom_ops.barrier import MATERIALIZE
from dynaxla.passes.selected_values import keep_selected
from tests.tolerances import assert_close


def _scores(x: Tensor) -> Tensor:
    """Sums of two products, of which a processor computes the one or the other without rounding."""
    places, slopes = torch.arange(x.shape[-1]), torch.tensor([0.5, 0.25])[:, None, None]
    return x * 0.35355339 + -(places[None, :] - places[:, None]).abs() * slopes


def _keep_largest(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores < scores.topk(3).values[..., -1:], -1e9)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda s: (s >= s.topk(3).values[..., -1:]).sum(-1),
    "softmax": lambda s: _keep_largest(s).softmax(-1),
    "sort": lambda s: (s == s.sort(-1, descending=True).values[..., 4:5]).any(-1),
    "kthvalue": lambda s: (s <= s.kthvalue(4, keepdim=True).values).sum(-1),
    "median": lambda s: (s == s.median(-1, keepdim=True).values).any(-1),
    "amax": lambda s: (s == s.amax((-2, -1), keepdim=True)).any(),
    "argmax": lambda s: (s == s.gather(-1, s.argmax(-1, keepdim=True))).any(-1),
    "cummax": lambda s: (s >= s.cummax(-1).values).sum(-1),
    "masked": lambda s: _keep_largest(s.tril().masked_fill(s > 2, -1e9)) > -1e9,
    "of some": lambda s: (s[..., ::2] >= s[..., ::2].topk(2).values[..., -1:]).sum(-1),
    "among some": lambda s: (s >= s[..., ::2].topk(2).values[..., -1:]).sum(-1),
    "largest negative": lambda s: (s >= torch.where(s < 0, s, -9.0).amax(-1, keepdim=True)).sum(-1),
    "columns": lambda s: (s.transpose(-1, -2) >= s.topk(3, -2).values[..., -1, :, None]).sum(-1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_eagers(name: str, dynamic: bool) -> None:
    def choose(x: Tensor) -> Tensor:
        return CHOICES[name](_scores(x))

    compiled = torch.compile(choose, backend="dynaxla", dynamic=dynamic)
    for seed in range(8):
        x = torch.randn(3, 2, 12, 12, generator=torch.Generator().manual_seed(seed))
        assert_close(compiled(x), choose(x))


@pytest.mark.parametrize("first", [0.0, float("nan"), float("inf"), -0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_values_come_through(dtype: torch.dtype, first: float) -> None:
    x = torch.randn(3, 12).to(dtype)
    x[0, 0] = first

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        y = -x
        return y, y == y.amax(-1, keepdim=True)

    for mine, its in zip(torch.compile(choose, backend="dynaxla")(x), choose(x), strict=True):
        assert_close(mine, its)
        assert torch.equal(mine.isnan(), its.isnan())
        assert mine.nan_to_num().signbit().equal(its.nan_to_num().signbit())


def _stored(choose: Callable[..., Any], *given: Tensor) -> int:
    """How many values of a function get memory."""
    module = make_fx(choose, tracing_mode="fake")(*given)
    keep_selected(module.graph)
    return sum(node.target is MATERIALIZE for node in module.graph.nodes)


def test_others_get_no_memory() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)

    def shared(x: Tensor, y: Tensor) -> Tensor:
        z = x * y
        return z >= z.topk(2).values[..., -1:]

    def within(x: Tensor, y: Tensor) -> Tensor:
        largest = (x * y).topk(3).values
        return largest >= largest[..., -1:]

    assert _stored(shared, x, y) == 1
    assert _stored(within, x, y) == 0
    assert _stored(lambda x, y: x >= x.topk(2).values[..., -1:], x, y) == 0  # an input has memory
    assert _stored(lambda x, y: x * y >= y.topk(2).values[..., -1:], x, y) == 0
    assert _stored(lambda x, y: (x * y).softmax(-1), x, y) == 0
    assert _stored(lambda x, y: (x * y)[:, :3] > (x * y)[:, 3:], x, y) == 0
