"""Cases of elementwise ops, views, creation and products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from tests.bucketing.poison import Case, Make, case


def floats(*shape: int | None, dtype: torch.dtype = torch.float32) -> Make:
    """A maker of normal values; None in the shape is the size."""
    return lambda s: torch.randn([s if d is None else d for d in shape], dtype=torch.float64).to(dtype)


def numbered(*sizes: int) -> torch.Tensor:
    """Numbers of which none is like another, each dim in one run."""
    return torch.arange(math.prod(sizes)).view(sizes).float().sin()


def ints(*shape: int | None, low: int = -9, high: int = 10, dtype: torch.dtype = torch.int64) -> Make:
    return lambda s: torch.randint(low, high, [s if d is None else d for d in shape]).to(dtype)


def bools(*shape: int | None) -> Make:
    return lambda s: torch.randint(0, 2, [s if d is None else d for d in shape]).bool()


def special(*shape: int | None) -> Make:
    """Ties, infinities and NaN among the values."""
    values = torch.tensor([0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])
    return lambda s: values[torch.randint(0, 6, [s if d is None else d for d in shape])]


def lengths(*shape: str, dtype: torch.dtype = torch.float32) -> Make:
    """A shape of sums and products of the size: "s+1", "2*s"."""
    return lambda s: torch.randn([int(eval(d, {"s": s})) for d in shape]).to(dtype)


def _grow(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sum(0)


def _write_front(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(y)
    y[:, 0] = 3
    return x


def _mask_in_place(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return x.masked_fill_(m, 0.0).sum()


ELEMENTWISE = [
    case("elementwise", "arithmetic", lambda x, y: (x * 2 + y, x / y, -x), floats(None, 3), floats(None, 3)),
    case("elementwise", "broadcast", lambda x, y: x[:, None] + y[None], floats(None, 3), floats(None, 3)),
    case("elementwise", "where", lambda m, x: torch.where(m, x, 0.0), bools(None, 3), floats(None, 3)),
    case("elementwise", "masked_fill", lambda m, x: x.masked_fill(m, -1), bools(None, 3), ints(None, 3)),
    case("elementwise", "cast", lambda x: (x.double(), x.bfloat16(), x.int(), x > 0), floats(None, 3)),
    case(
        "elementwise",
        "integers",
        lambda x, y: (x.div(3, rounding_mode="floor"), x % 5, x & y, x == y),
        ints(None, 3),
        ints(None, 3),
    ),
    case("elementwise", "activations", lambda x: F.gelu(x) * torch.sigmoid(x), floats(None, 6, dtype=torch.bfloat16)),
    case("elementwise", "size_as_value", lambda x: (x * x.shape[0], x - x.numel(), x / x.shape[1]), floats(None, 6)),
    case("elementwise", "size_as_int", lambda x: (x + x.shape[0], x % x.shape[0], x == x.shape[0]), ints(None, 3)),
    case("elementwise", "in_place", _grow, floats(None, 6)),
    case("elementwise", "in_place_part", _write_front, floats(None, 6), floats(None, 6)),
    case("elementwise", "in_place_mask", _mask_in_place, floats(None, 6), bools(None, 6)),
    case("elementwise", "input_returned", lambda x: (x, x + 1, x), floats(None, 6)),
    case("elementwise", "sizes_returned", lambda x: (x + 1, x.shape[0] * 2, x.numel()), floats(None, 6)),
    case("elementwise", "constant", lambda x: torch.ones_like(x).exp().sum(0), floats(None, 6)),
    case("elementwise", "two_sizes", lambda x, y: x[:, None] * y, lengths("s"), lengths("s+3")),
    case("elementwise", "size_modulo", lambda x: x + x.shape[0] % 3, floats(None, 3)),
    case("elementwise", "size_root", lambda x: x * x.shape[0] ** -0.5, floats(None, 3)),
    case("elementwise", "size_half", lambda x: x * (x.shape[0] * 0.5), floats(None, 3)),
    case("elementwise", "size_ratio", lambda x: x + x.shape[0] / x.shape[1], floats(None, 6)),
    case("elementwise", "size_ratio_whole", lambda x: x + x.shape[0] / x.shape[1], ints(None, 6)),
    case("elementwise", "size_ratio_half", lambda x: x * (1 / x.shape[0]), floats(None, 6, dtype=torch.bfloat16)),
    case("creation", "full_of_ratio", lambda x: torch.full((x.shape[0],), 1 / x.shape[0]) + x.sum(1), floats(None, 6)),
    case("scalar_tensor", "size_as_tensor", lambda x: x.sum() + torch.scalar_tensor(x.shape[0]), floats(None, 6)),
]
VIEWS = [
    case("view", "merge", lambda x: x.reshape(-1, 3).sum(0), lengths("s", "s+1", "3")),
    case("view", "merge_softmax", lambda x: x.reshape(-1, 3).softmax(0), lengths("s", "s+1", "3")),
    case("view", "merge_amax", lambda x: x.reshape(-1).amax(), lengths("s", "s+1")),
    case("view", "merge_mean", lambda x: x.reshape(-1, 3).mean(0), lengths("s", "s+1", "3")),
    case("view", "merge_var", lambda x: x.reshape(-1, 3).var(0), lengths("s", "s+1", "3")),
    case("view", "merge_and_back", lambda x: x.flatten(0, 1).mul(2).view(x.shape), lengths("s", "s+1", "3")),
    case("view", "merge_with_fixed", lambda x: x.reshape(-1).flip(0).cumsum(0), floats(None, 3)),
    case("view", "heads", lambda x: x.view(2, x.shape[1], 2, 2).transpose(1, 2).contiguous(), floats(2, None, 4)),
    case("view", "heads_back", lambda x: x.transpose(1, 2).reshape(2, x.shape[2], 12) + 1, floats(2, 4, None, 3)),
    case("view", "merge_outputs", lambda x: x.permute(1, 0, 2).reshape(-1, 3), lengths("s", "s+1", "3")),
    case("view", "whole", lambda x: x.view(-1) * 2, lengths("s", "s+1", "3")),
    case("permute", "transpose", lambda x: (x.t(), x.t() * 2, x.t().contiguous()), floats(None, 6)),
    case("permute", "permute", lambda x: x.permute(2, 0, 1).exp(), floats(None, 6, 3)),
    case("reduction", "permuted_input", lambda x: (x + 1, x.sum(0)), lambda s: torch.randn(6, s, 3).permute(1, 2, 0)),
    case("reduction", "full_result", lambda x: x.sum(1, keepdim=True), lambda s: torch.randn(3, s, 2).permute(2, 1, 0)),
    case("unsqueeze", "unsqueeze", lambda x: (x.unsqueeze(1) + 1, x.unsqueeze(-1) * 2), floats(None, 6)),
    case(
        "squeeze", "squeeze", lambda x: ((x + 1).squeeze(1), x.mul(2).squeeze(), x.squeeze((1, 2))), floats(None, 1, 1)
    ),
    case("expand", "expand", lambda x, y: x.expand(-1, y.shape[0]).sum(1), floats(None, 1), lengths("s+2")),
    case("expand", "expand_in_front", lambda x, y: x.expand(y.shape[0], -1) + 1, floats(None), lengths("s+2")),
    case(
        "expand",
        "expand_merged",
        lambda x: (x.repeat_interleave(2, 0).unsqueeze(0).expand(3, -1, -1), x.unsqueeze(1).expand(-1, x.shape[0], -1)),
        floats(None, 3),
        sizes=(5, 7, 9, 12),
    ),
    case("repeat", "repeat", lambda x: (x.repeat(1, 3), x.repeat(2, 1).sum(0)), floats(None, 3)),
    case("expand", "repeat_interleave", lambda x: x.repeat_interleave(3, 0).flip(0), floats(None, 3)),
    case("slice", "slices", lambda x: (x[:, 1:] + 0, x[:, :-1] * 1, x[:, ::2] + 1, x[:, 1::2]), floats(3, None)),
    case("slice", "from_the_end", lambda x: (x[:, -2:].sum(1), x[:, -2:-1] + 1), floats(3, None)),
    case("slice", "shifted", lambda x: x[:, 1:] * x[:, :-1], floats(3, None)),
    case("slice", "slice_by_size", lambda x, y: x[:, : y.shape[0]] + 1, lengths("3", "s+4"), lengths("s")),
    case("slice", "slice_merged", lambda x: x.reshape(-1)[2:] + 1, floats(None, 3)),
    case("slice", "narrow", lambda x: x.narrow(1, 1, 1).exp(), floats(3, None)),
    case("split", "chunk", lambda x: [part + 1 for part in x.chunk(2, 1)], floats(2, None)),
    case("select", "select", lambda x: (x[:, 0] + 1, x[:, 1] * 2), floats(3, None)),
    case("select", "last", lambda x: (x[:, -1] + 1, x[:, -2]), floats(3, None)),
    case("select", "last_of_merged", lambda x: x.reshape(-1)[-1] + x.reshape(-1)[3], floats(None, 3)),
    case("split", "split", lambda x: [part.sum(0) for part in x.split(2, 1)], floats(None, 4)),
    case("split", "split_sizes", lambda x: [part + 1 for part in x.split([1, 3], 1)], floats(None, 4)),
    case("unbind", "unbind", lambda x: [part + 1 for part in x.unbind(1)], floats(None, 4)),
]
CREATION = [
    case("creation", "zeros", lambda x: torch.zeros(x.shape[0], 3).sum() + x.sum(), floats(None, 3)),
    case("creation", "full", lambda x: torch.full((x.shape[0],), 2.5).prod() + x.sum(), floats(None, 3)),
    case("creation", "likes", lambda x: (torch.ones_like(x).sum(0), torch.full_like(x, 7) * x), floats(None, 6)),
    case("creation", "like_merged", lambda x: torch.ones_like(x.reshape(-1)) + x.reshape(-1), lengths("s", "s+1")),
    case("creation", "news", lambda x: (x.new_zeros(x.shape[0]) + 1, x.new_full(x.shape, 3)), floats(None, 6)),
    case("creation", "full_of_size", lambda x: torch.full((x.shape[0],), x.shape[0]) + 1, floats(None, 6)),
    case("draw", "draw", lambda x: _draw(x, "uniform").cumsum(0) + x, floats(None, 3)),
    case("draw", "draw_square", lambda x: _draw(x @ x.T, "normal").sum(1), floats(None, 3)),
    case("arange", "arange", lambda x: torch.arange(x.shape[0]) * 2 + x.sum(1).long(), ints(None, 3)),
    case("arange", "arange_steps", lambda x: (torch.arange(1, x.shape[0], 2) + 1).sum() + x.sum(), ints(None, 3)),
    case("arange", "arange_down", lambda x: torch.arange(x.shape[0] - 1, -1, -1)[:, None] + x, ints(None, 3)),
    case("arange", "arange_floats", lambda x: torch.arange(x.shape[0], dtype=torch.float32) / x.shape[0], floats(None)),
    case("arange", "causal_mask", lambda x: x.masked_fill(_causal(x), 0.0).sum(-1), lengths("s", "s")),
]


def _causal(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[-1])
    return positions[None, :] > positions[:, None]


class _Layers(torch.nn.Module):
    """Parameters, whose sizes do not vary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.layer_norm = torch.nn.LayerNorm(6)
        self.rms_norm = torch.nn.RMSNorm(6)
        self.batch_norm = torch.nn.BatchNorm1d(6).eval()
        self.embedding = torch.nn.Embedding(11, 6)


LAYERS = _Layers()
PRODUCTS = [
    case("product", "mm", lambda x, y: x @ y, floats(3, None), floats(None, 6)),
    case("product", "mm_outer", lambda x, y: x @ y, floats(None, 3), floats(3, None)),
    case("product", "gram", lambda x: (x.t() @ x, x @ x.t()), floats(None, 6)),
    case("product", "double", lambda x: x.t() @ x, floats(None, 6, dtype=torch.float64)),
    case("product", "half", lambda x, y: x @ y, *[floats(*d, dtype=torch.bfloat16) for d in ((3, None), (None, 6))]),
    case("product", "integer", lambda x: x.t() @ x, ints(None, 6)),
    case("product", "bmm", lambda x, y: torch.bmm(x, y), lengths("s", "3", "s+1"), lengths("s", "s+1", "2")),
    case("product", "baddbmm", lambda b, x: torch.baddbmm(b, x, x, alpha=2), floats(None, 3, 3), floats(None, 3, 3)),
    case("product", "addmm", lambda b, x, y: torch.addmm(b, x, y), floats(6), floats(2, None), floats(None, 6)),
    case("product", "einsum", lambda x, y: torch.einsum("bsh,bth->bst", x, y), floats(2, None, 6), floats(2, None, 6)),
    case(
        "product", "einsum_two", lambda x, y: torch.einsum("abi,abj->ij", x, y),
        lengths("s", "s+1", "3"), lengths("s", "s+1", "2"),
    ),
    case("product", "matmul_3d", lambda x, y: x @ y, floats(2, 3, None), floats(None, 6)),
    case("elementwise", "outer", lambda x, y: torch.outer(x, y), floats(None), lengths("s+1")),
    case("product", "dot", lambda x, y: (torch.dot(x, y), x @ y), floats(None), floats(None)),
    case("product", "matvec", lambda x, y: x @ y, floats(6, None), floats(None)),
    case("linear", "linear", lambda x: LAYERS.linear(x), floats(None, 6)),
    case("linear", "linear_3d", lambda x: LAYERS.linear(x).sum(1), floats(3, None, 6)),
    case("layer_norm", "layer_norm", lambda x: LAYERS.layer_norm(x).sum(1), floats(3, None, 6)),
    case("mean", "rms_norm", lambda x: LAYERS.rms_norm(x).sum(1), floats(3, None, 6)),
    case("batch_norm", "batch_norm_eval", lambda x: LAYERS.batch_norm(x), floats(None, 6)),
    case("batch_norm", "batch_norm_eval_long", lambda x: LAYERS.batch_norm(x).sum(2), floats(None, 6, 3)),
]  # fmt: skip


def _attention(**settings: Any) -> Any:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **settings)


def _one_sequence(queries: str, keys: str) -> tuple[Make, ...]:
    """Makers of queries of one length, and of keys and values of another."""
    return tuple(lengths("2", "3", size, "4") for size in (queries, keys, keys))


def _cut(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m[: q.shape[2], : k.shape[2]])


def _last_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The queries are the last of the places that the keys have."""
    places = torch.arange(k.shape[2])
    seen = places <= places[k.shape[2] - q.shape[2] :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _behind_a_cache(q: torch.Tensor, past: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    keys = torch.cat([past, k], 2)
    return F.scaled_dot_product_attention(q, keys, keys, is_causal=True)


ATTENTION = [
    case("attention", "attention", _attention(), *[floats(2, 3, None, 4)] * 3),
    case("attention", "causal", _attention(is_causal=True), *[floats(2, 3, None, 4)] * 3),
    case("attention", "scaled", _attention(scale=0.3), *[floats(2, 3, None, 4)] * 3),
    case("attention", "batch", _attention(), *[floats(None, 3, 2, 4)] * 3),
    case(
        "attention", "cross", _attention(),
        lengths("2", "3", "s", "4"), lengths("2", "3", "s+1", "4"), lengths("2", "3", "s+1", "4"),
    ),
    case(
        "attention", "mask", lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        floats(2, 3, None, 4), lambda s: torch.randn(s, s),
    ),
    case(
        "attention", "bool_mask", lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        floats(2, 3, None, 4), lambda s: torch.ones(s, s).bool().tril(),
    ),
    case(
        "attention", "row_mask", lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m[:, None, None]),
        floats(2, 3, None, 4), lambda s: torch.arange(s).expand(2, s) < s - 1,
    ),
    case("attention", "causal_more_keys", _attention(is_causal=True), *_one_sequence("s", "2*s+1")),
    case("attention", "causal_more_queries", _attention(is_causal=True), *_one_sequence("2*s+1", "s")),
    case("attention", "causal_fixed_keys", _attention(is_causal=True), *_one_sequence("s", "4")),
    case("attention", "causal_fixed_queries", _attention(is_causal=True), *_one_sequence("4", "s")),
    case("attention", "causal_behind_a_cache", _behind_a_cache, *_one_sequence("s", "s")),
    case("attention", "mask_cut", _cut, *_one_sequence("s", "2*s+1"), floats(31, 63)),
    case("attention", "last_rows", _last_rows, *_one_sequence("s", "2*s+1")),
    case("attention", "attention_batches_apart",
         lambda x: F.scaled_dot_product_attention(x.flatten(0, 1), *[numbered(2 * x.shape[1], 3, 5, 4)] * 2),
         floats(2, None, 3, 2, 4)),
    case("attention", "attention_batches_apart_mask",
         lambda x: F.scaled_dot_product_attention(
             x.flatten(0, 1), *[numbered(2 * x.shape[1], 3, 5, 4)] * 2, numbered(2 * x.shape[1], 1, 2, 5)),
         floats(2, None, 3, 2, 4)),
    case("attention", "keys_and_values_apart",
         lambda x: F.scaled_dot_product_attention(x[:, :, 0], x.flatten(2, 3), numbered(2, 3, 2 * x.shape[3], 4)),
         floats(2, 3, 2, None, 4)),
    case(None, "heads_vary", _attention(), *[floats(2, 3, 4, None)] * 3, sizes=(5, 9)),
]  # fmt: skip


def _draw(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Random numbers of one key, in the shape of x; eager computes them by itself."""
    drawn: torch.Tensor = torch.ops.dynaxla.random(torch.tensor(5), list(x.shape), kind, torch.float32)
    return drawn


CASES: list[Case] = [*ELEMENTWISE, *VIEWS, *CREATION, *PRODUCTS, *ATTENTION]
