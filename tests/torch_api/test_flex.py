"""What the wall relies on for `flex_attention`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dynaxla.torch_api import captured_functions, flex
from tests.torch_api.boundary import boundary


@boundary("flex.FLEX_ATTENTION", "flex.map_over_scores")
def test_functions_of_one_score_give_all() -> None:
    scores, table = torch.randn(2, 3, 4, 5), torch.randn(3, 2)
    places = [torch.arange(size) for size in scores.shape]

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, read: Tensor) -> Tensor:
        return score * read[head, 1] + (query - key) * batch

    mine = flex.map_over_scores(changed, scores, places, [table])
    batch, _, query, key = torch.meshgrid(*places, indexing="ij")
    torch.testing.assert_close(mine, scores * table[:, 1, None, None] + (query - key) * batch)
    mask = flex.map_over_scores(lambda b, h, q, k: q >= k, None, places, [])
    assert torch.equal(mask, query >= key)
    assert torch.ops.higher_order.flex_attention is flex.FLEX_ATTENTION


@boundary("flex.accept_tensors", "captured_functions.is_captured_for_us")
def test_gradients_on_the_host_are_for_our_captures_alone() -> None:
    flex.accept_tensors()
    query, key, value = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))

    def attend(*given: Any) -> Any:
        return flex_attention(*given)

    torch.compile(attend, backend="dynaxla", fullgraph=True)(query, key, value).sum().backward()
    assert query.grad is not None
    assert not captured_functions.is_captured_for_us()
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        attend(query, key, value)
