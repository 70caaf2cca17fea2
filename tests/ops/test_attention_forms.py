"""Attention of many queries, in blocks, and of heads that share keys and values: eager's numbers, and no repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dynaxla.observe.recorder import Recorder
from dynaxla.passes.grouped_query_attention import share_heads
from tests.tolerances import assert_close

aten = torch.ops.aten
Repeat = Callable[[Tensor, int], Tensor]


def expanded(x: Tensor, times: int) -> Tensor:
    """As transformers repeats heads."""
    batch, heads, length, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def interleaved(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, 1)


def tiled(x: Tensor, times: int) -> Tensor:
    """Each head stands once in every copy of all: no head is shared by its neighbours."""
    return x.repeat(1, times, 1, 1)


def longer(x: Tensor, times: int) -> Tensor:
    """Repeats that are no heads, but places."""
    batch, heads, length, size = x.shape
    wide = x[:, :, :, None, :].expand(batch, heads, length, times, size).reshape(batch, heads, length * times, size)
    return wide.reshape(batch, heads * times, length, size)


def attending(repeat: Repeat, times: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k, times), repeat(v, times), mask)

    return attend


def operands(length: int, queries: int = 2, heads: int = 6, shared: int = 2) -> tuple[Tensor, ...]:
    k, v = (torch.randn(2, shared, length, 8) for _ in range(2))
    return torch.randn(2, heads, queries, 8), k, v, torch.randn(2, 1, queries, length)


@pytest.mark.parametrize("repeat", [expanded, interleaved, tiled, longer])
@torch.no_grad()
def test_heads_that_share_keys(repeat: Repeat, recorder: Recorder) -> None:
    attend, before = attending(repeat, 3), recorder.snapshot()
    compiled = torch.compile(attend, backend="dynaxla", options={"fallback": "error"})
    for length in (5, 9, 7):
        given = operands(length)
        assert_close(compiled(*given), attend(*given))
    assert recorder.snapshot().exact_shapes == before.exact_shapes


@pytest.mark.parametrize(
    ("repeat", "is_shared"), [(expanded, True), (interleaved, True), (tiled, False), (longer, False)]
)
@torch.no_grad()
def test_repeats_of_heads_are_not_written(repeat: Repeat, is_shared: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys, values = repeat(k, 3), repeat(v, 3)
        made: Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(q, keys, values, attn_mask=mask)[0]
        return made

    given = operands(5)
    graph = make_fx(attend, tracing_mode="fake")(*given)
    share_heads(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    (call,) = graph.graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default
    )
    assert [node.op == "placeholder" for node in call.args[:3]] == [True, is_shared, is_shared]
    assert_close(graph(*given), attend(*given))


@torch.no_grad()
def test_values_alone_that_are_repeated_stay_so() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, expanded(v, 3), mask)

    q, _, v, mask = operands(5)
    k = torch.randn(2, 6, 5, 8)
    assert_close(torch.compile(attend, backend="dynaxla")(q, k, v, mask), attend(q, k, v, mask))


MASKS: dict[str, Callable[[int, int], Tensor | None]] = {
    "none": lambda queries, keys: None,
    "of_each_head": lambda queries, keys: torch.randn(1, 8, queries, keys),
    "of_booleans": lambda queries, keys: (torch.rand(queries, keys) > 0.5) & (torch.arange(queries) != 3)[:, None],
    "of_keys": lambda queries, keys: torch.randn(1, 1, 1, keys),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shared", [8, 2])
@torch.no_grad()
def test_many_queries(dtype: torch.dtype, mask: str, shared: int, recorder: Recorder) -> None:
    """More scores than are made at once; the last block is not full, and a query that attends to nothing gives zeros."""
    q, (k, v) = torch.randn(1, 8, 601, 4, dtype=dtype), torch.randn(2, 1, shared, 900, 4, dtype=dtype)
    given = MASKS[mask](601, 900)
    if given is not None and given.is_floating_point():
        given = given.to(dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, given, enable_gqa=True)

    with recorder.expect(compiles=1):
        assert_close(torch.compile(attend, backend="dynaxla", options={"fallback": "error"})(q, k, v), attend(q, k, v))


@torch.no_grad()
def test_many_queries_see_the_keys_up_to_their_own(recorder: Recorder) -> None:
    q, k, v = torch.randn(3, 1, 8, 777, 4)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with recorder.expect(compiles=1):
        assert_close(torch.compile(attend, backend="dynaxla", options={"fallback": "error"})(q, k, v), attend(q, k, v))
