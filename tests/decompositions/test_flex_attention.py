"""`flex_attention` is part of the program, with its functions of scores and masks, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

Score = Callable[..., Tensor]
HEADS, GROUPS, SIZE = 4, 2, 8


def _keep(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Tensor:
    return score


def _bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Tensor:
    return score + table[head, query - key + 64]


def _soft_cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, table: Tensor) -> Tensor:
    return 8 * torch.tanh(score / 8) + table[head, 0] * score


def _all(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= 0


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < 5 + head)


def _empty_rows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query % 3 != 0)


def attend(score: Score, mask: Callable[..., Tensor], grouped: bool = True) -> Callable[..., Any]:
    def run(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Any:
        blocks = create_block_mask(mask, None, None, query.shape[2], key.shape[2], device=query.device)
        changed = None if score is _keep else lambda s, b, h, q, k: score(s, b, h, q, k, table)
        result, aux = flex_attention(
            query,
            key,
            value,
            score_mod=changed,
            block_mask=blocks,
            enable_gqa=grouped,
            return_aux=AuxRequest(lse=True),
        )
        return result, aux.lse

    return run


def expect(score: Score, mask: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Any:
    """The same by plain ops, in float64: a softmax over the keys that a query attends to, zeros where there are none."""
    query, key, value, table = (x.double() for x in (query, key, value, table))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    places = torch.meshgrid(*(torch.arange(n) for n in (*query.shape[:3], key.shape[2])), indexing="ij")
    scores, holds = score(query @ key.mT / math.sqrt(query.shape[-1]), *places, table), mask(*places)
    weights = scores.exp() * holds
    total = weights.sum(-1, keepdim=True)
    known = total.where(total != 0, 1)
    return weights / known @ value, known.log().where(total != 0, -math.inf).squeeze(-1)


def inputs(length: int, dtype: torch.dtype = torch.float32, keys: int | None = None) -> tuple[Tensor, ...]:
    queries = torch.randn(2, HEADS, length, SIZE, dtype=dtype)
    key, value = (torch.randn(2, GROUPS, keys or length, SIZE, dtype=dtype) for _ in range(2))
    return queries, key, value, torch.randn(HEADS, 130, dtype=dtype)


SCORES, MASKS = (_keep, _bias, _soft_cap), (_all, _causal, _window, _empty_rows)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_results_and_gradients_of_lengths_in_buckets(
    score: Score, mask: Callable[..., Tensor], recorder: Recorder
) -> None:
    compiled = torch.compile(attend(score, mask), backend="dynaxla")
    with recorder.expect(eager_ops=0):
        for length, is_known in ((16, False), (24, False), (21, True)):
            before = recorder.snapshot().compiles
            given = [x.requires_grad_() for x in inputs(length)]
            twins = [x.detach().clone().requires_grad_() for x in given]
            results, expected = compiled(*given), expect(score, mask, *twins)
            for mine, right in zip(results, expected, strict=True):
                torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)
            factors = torch.randn_like(results[0])
            finite = torch.where(expected[1].detach() == -math.inf, 0, 1.0)
            (results[0] * factors).sum().add((results[1].nan_to_num(0, 0, 0) * finite).sum()).backward()
            (expected[0] * factors).sum().add((expected[1].where(finite == 1, 0)).sum()).backward()
            for mine, right in zip(given, twins, strict=True):
                torch.testing.assert_close(mine.grad, right.grad, rtol=1e-3, atol=1e-5)
            assert (recorder.snapshot().compiles == before) is is_known, "21 has the bucket of 24"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", SCORES)
def test_dtypes(score: Score, dtype: torch.dtype) -> None:
    given = inputs(16, dtype, keys=24)
    with torch.no_grad():
        results = torch.compile(attend(score, _causal), backend="dynaxla", fullgraph=True)(*given)
        eager = attend(score, _causal)(*given)
    for mine, theirs, right in zip(results, eager, expect(score, _causal, *given), strict=True):
        assert_close(mine, right.to(theirs.dtype))


def test_rows_without_keys_are_zeros() -> None:
    with torch.no_grad():
        output, logsumexp = torch.compile(attend(_keep, _empty_rows), backend="dynaxla")(*inputs(16))
    assert (output[:, :, ::3] == 0).all()
    assert (logsumexp[:, :, ::3] == -math.inf).all()


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_the_output_has_its_dims_in_the_order_of_the_query(order: tuple[int, ...]) -> None:
    query, key, value, table = inputs(16)
    query = query.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    with torch.no_grad():
        for score in SCORES:
            mine = torch.compile(attend(score, _causal), backend="dynaxla")(query, key, value, table)
            assert mine[0].stride() == attend(score, _causal)(query, key, value, table)[0].stride()


def test_a_mask_reads_tensors() -> None:
    """Several documents in one row, each query among the keys of its own."""

    def packed(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Any:
        def mask(batch: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
            return (documents[batch, at] == documents[batch, to]) & (at >= to)

        blocks = create_block_mask(mask, query.shape[0], None, query.shape[2], key.shape[2], device=query.device)
        return flex_attention(query, key, value, block_mask=blocks)

    query, key, value = (torch.randn(2, HEADS, 12, SIZE) for _ in range(3))
    documents = torch.randint(0, 3, (2, 12)).sort(1).values
    mine = torch.compile(packed, backend="dynaxla", fullgraph=True)(query, key, value, documents)
    torch.testing.assert_close(mine, packed(query, key, value, documents), rtol=1e-4, atol=1e-5)


def test_one_row_of_keys_for_all() -> None:
    query, key, value, _ = inputs(16)

    def shared(query: Tensor, key: Tensor, value: Tensor) -> Any:
        blocks = create_block_mask(_causal, 2, None, 16, 16, device="cpu")
        return flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)

    given = (query, key[:1], value[:1])
    mine = torch.compile(shared, backend="dynaxla")(*given)
    torch.testing.assert_close(mine, shared(*given), rtol=1e-4, atol=1e-5)
