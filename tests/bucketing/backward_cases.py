"""Cases of gradients: the ops of backward graphs, called as they stand there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from dynaxla.custom_ops import internal
from tests.bucketing.plain_cases import floats, ints, lengths, numbered
from tests.bucketing.poison import Case, Make, case

aten = torch.ops.aten
HALF = torch.bfloat16
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
Function = Callable[..., Any]
# Sizes that share a bucket where 3 * size and size * (size + 1) do too.
THREEFOLD = (7, 8, 11, 12, 13, 16, 6)
SQUARED = (6, 12, 13)


def probabilities(*shape: int | None, dtype: torch.dtype = torch.float32) -> Make:
    made = floats(*shape, dtype=torch.float64)
    return lambda s: made(s).softmax(1).to(dtype)


def units(*shape: int | None, dtype: torch.dtype = torch.float32) -> Make:
    """Numbers between 0.1 and 0.9."""
    return lambda s: (torch.rand([s if d is None else d for d in shape], dtype=torch.float64) * 0.8 + 0.1).to(dtype)


def _softmax(dim: int, dtype: torch.dtype = torch.float32) -> Function:
    return lambda g, y: aten._softmax_backward_data(g, y, dim, dtype)


def _log_softmax(dim: int, dtype: torch.dtype = torch.float32) -> Function:
    return lambda g, y: aten._log_softmax_backward_data(g, y.log(), dim, dtype)


SOFTMAX = [
    case("softmax_backward", "softmax_backward", _softmax(1), floats(3, None), probabilities(3, None)),
    case("softmax_backward", "softmax_backward_beside", _softmax(1), floats(None, 6), probabilities(None, 6)),
    case(
        "softmax_backward",
        "softmax_backward_half",
        _softmax(1, HALF),
        floats(3, None, dtype=HALF),
        probabilities(3, None, dtype=HALF),
    ),
    case("softmax_backward", "log_softmax_backward", _log_softmax(1), floats(3, None), probabilities(3, None)),
    case(
        "softmax_backward",
        "log_softmax_backward_sum",
        lambda g, y: _log_softmax(1)(g, y).sum(0),
        floats(None, 6),
        probabilities(None, 6),
    ),
    case(
        "softmax_backward",
        "log_softmax_backward_half",
        _log_softmax(-1, HALF),
        floats(3, None, dtype=HALF),
        probabilities(3, None, dtype=HALF),
    ),
]


def _pair(op: Any, reduction: str, *settings: Any) -> Function:
    return lambda g, x, y: op(g, x, y, REDUCTIONS[reduction], *settings)


def _pairs(name: str, op: Any, *settings: Any) -> list[Case]:
    return [
        case("loss_backward", f"{name}_mean", _pair(op, "mean", *settings), floats(), units(None, 6), units(None, 6)),
        case("loss_backward", f"{name}_sum", _pair(op, "sum", *settings), floats(), units(None, 6), units(None, 6)),
        case(
            "loss_backward",
            f"{name}_none",
            _pair(op, "none", *settings),
            floats(None, 6),
            units(None, 6),
            units(None, 6),
        ),
        case(
            "loss_backward",
            f"{name}_half",
            _pair(op, "mean", *settings),
            floats(dtype=HALF),
            units(None, 6, dtype=HALF),
            units(None, 6, dtype=HALF),
        ),
    ]


def _nll(reduction: str, weighted: bool = False, ignore: int = 2, op: Any = aten.nll_loss_backward) -> Function:
    def gradient(
        g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, w: torch.Tensor | None = None
    ) -> torch.Tensor:
        return op(g, x, y, w if weighted else None, REDUCTIONS[reduction], ignore, total)

    return gradient


LABELS = ints(None, low=0, high=4)
LOSSES = [
    *_pairs("mse_backward", aten.mse_loss_backward),
    *_pairs("smooth_l1_backward", aten.smooth_l1_loss_backward, 0.3),
    *_pairs("huber_backward", aten.huber_loss_backward, 0.3),
    *_pairs("soft_margin_backward", aten.soft_margin_loss_backward),
    *_pairs("bce_backward", lambda g, x, y, how: aten.binary_cross_entropy_backward(g, x, y, None, how)),
    case(
        "loss_backward",
        "bce_backward_weighted",
        lambda g, x, y, w: aten.binary_cross_entropy_backward(g, x, y, w, 1),
        floats(),
        units(None, 6),
        units(None, 6),
        units(None, 6),
    ),
    *[
        case(
            "nll_loss_backward",
            f"nll_backward_{how}",
            _nll(how),
            floats(None) if how == "none" else floats(),
            floats(None, 4),
            LABELS,
            units(),
        )
        for how in REDUCTIONS
    ],
    *[
        case(
            "nll_loss_backward",
            f"nll_backward_{how}_of_one",
            _nll(how),
            floats(1),
            floats(None, 4),
            LABELS,
            units(),
        )
        for how in ("mean", "sum")
    ],
    *[
        case(
            "nll_loss_backward",
            f"nll_backward_{how}_one_row",
            _nll(how, weighted=True),
            floats(),
            floats(None),
            lambda s: torch.tensor(s - 1),
            units(),
            units(None),
            sizes=(7, 9, 12, 16),
        )
        for how in REDUCTIONS
    ],
    case(
        "nll_loss_backward",
        "nll_backward_summed",
        lambda *given: _nll("mean")(*given).sum(0),
        floats(),
        floats(None, 4),
        LABELS,
        units(),
    ),
    case(
        "nll_loss_backward",
        "nll_backward_weighted",
        _nll("mean", weighted=True),
        floats(),
        floats(None, 4),
        LABELS,
        units(),
        units(4),
    ),
    case(
        "nll_loss_backward",
        "nll_backward_half",
        _nll("mean"),
        floats(dtype=HALF),
        floats(None, 4, dtype=HALF),
        LABELS,
        units(dtype=HALF),
    ),
    case(
        "nll_loss_backward",
        "nll_backward_image",
        _nll("mean", op=aten.nll_loss2d_backward),
        floats(),
        floats(2, 4, None, 3),
        ints(2, None, 3, low=0, high=4),
        units(),
    ),
    case(
        "nll_loss_backward",
        "nll_backward_merged",
        lambda g, x, y, t: _nll("mean")(g, x.flatten(0, 1), y, t).view(x.shape),
        floats(),
        floats(3, None, 4),
        lambda s: torch.randint(0, 4, (3 * s,)),
        units(),
        sizes=THREEFOLD,
    ),
]


def _embedding(rows: int = 5, padding: int = -1, by_count: bool = False) -> Function:
    return lambda g, i: aten.embedding_dense_backward(g, i, rows, padding, by_count)


NUMBERS = ints(3, None, low=0, high=5)
POSITIONS = [
    case("embedding_backward", "embedding_backward", _embedding(), floats(3, None, 6), NUMBERS),
    case("embedding_backward", "embedding_backward_padding", _embedding(padding=2), floats(3, None, 6), NUMBERS),
    case("embedding_backward", "embedding_backward_counted", _embedding(by_count=True), floats(3, None, 6), NUMBERS),
    case("embedding_backward", "embedding_backward_half", _embedding(), floats(3, None, 6, dtype=HALF), NUMBERS),
    case(
        "embedding_backward",
        "embedding_backward_int32",
        _embedding(),
        floats(3, None, 6),
        ints(3, None, low=0, high=5, dtype=torch.int32),
    ),
    case(
        "embedding_backward",
        "embedding_backward_merged",
        lambda g, i: _embedding()(g.flatten(0, 1) * (i[:, None] + 1), i),
        floats(3, None, 6),
        lambda s: torch.randint(0, 5, (3 * s,)),
        sizes=THREEFOLD,
    ),
    case(
        "select_backward",
        "select_backward",
        lambda g, x: (
            aten.select_backward(g, x.shape, 1, 0) + x,
            aten.select_backward(g, x.shape, 1, -1).sum(0),
            aten.select_backward(g, x.shape, 1, 1).cumsum(1),
        ),
        floats(3),
        floats(3, None),
    ),
    case(
        "select_backward",
        "select_backward_beside",
        lambda g: aten.select_backward(g, [g.shape[0], 3], 1, -1) * 2,
        floats(None),
    ),
    case(
        "slice_backward",
        "slice_backward",
        lambda g, x: (
            aten.slice_backward(g, x.shape, 1, 1, 2**63 - 1, 1) + x,
            aten.slice_backward(g, x.shape, 1, 0, -1, 1).sum(1),
        ),
        lengths("3", "s-1"),
        floats(3, None),
        sizes=(7, 9, 12, 16, 31),
    ),
    case(
        "slice_backward",
        "slice_backward_end",
        lambda g, x: aten.slice_backward(g, x.shape, 1, -2, 2**63 - 1, 1).cumsum(1),
        floats(3, 2),
        floats(3, None),
    ),
    case(
        "slice_backward",
        "slice_backward_steps",
        lambda g, x: aten.slice_backward(g, x.shape, 1, 1, 2**63 - 1, 3).sum(1) + x.sum(1),
        lengths("3", "(s+1)//3"),
        floats(3, None),
        sizes=(7, 9, 12, 16, 31),
    ),
    case(
        "slice_backward",
        "slice_backward_beside",
        lambda g: aten.slice_backward(g, [g.shape[0], 6], 1, 2, 6, 2).sum(0),
        floats(None, 2),
    ),
    case(
        "diagonal_backward",
        "diagonal_backward",
        lambda g, x: aten.diagonal_backward(g, x.shape, 1, 0, 1) * x,
        lengths("s"),
        lengths("s", "s+1"),
    ),
    case(
        "unfold_backward",
        "unfold_backward",
        lambda g, x: aten.unfold_backward(g, x.shape, 1, 3, 1) + x,
        lengths("3", "s-2", "3"),
        floats(3, None),
        sizes=(7, 9, 12, 16, 31),
    ),
    case(
        "unfold_backward",
        "unfold_backward_of_one_row",
        lambda g, x: aten.unfold_backward(g, x.shape, 1, 3, 1) / (1 + x.abs()),
        floats(1, 5, 3),
        floats(None, 7),
        sizes=(7, 9, 12, 16, 31),
    ),
    case("glu_backward", "glu_backward", lambda g, x: aten.glu_backward(g, x, 1), floats(None, 2), floats(None, 4)),
    case(
        "scatter",
        "pick_backward",
        lambda g, i, x: aten.value_selecting_reduction_backward(g, 1, i, x.shape, False).sum(0),
        floats(None),
        ints(None, low=0, high=4),
        lengths("s", "4"),
    ),
    case(
        "scatter",
        "topk_backward",
        lambda g, i, x: torch.zeros_like(x).scatter(1, i, g).cumsum(1),
        floats(3, 2),
        lambda s: torch.stack([torch.randperm(s)[:2] for _ in range(3)]),
        floats(3, None),
    ),
    case("flip", "cumsum_backward", lambda g: g.flip(1).cumsum(1).flip(1), floats(3, None)),
    case(
        "elementwise",
        "prelu_backward",
        lambda g, x, w: [part.sum(0) for part in aten._prelu_kernel_backward(g, x, w)],
        floats(None, 6),
        floats(None, 6),
        floats(1, 6),
    ),
]


def _attention(mask: bool = False, **settings: Any) -> Function:
    """Gradients by torch's own op on the CPU, whose forward results are made in front of it."""

    def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *masks: torch.Tensor) -> Any:
        named = {"attn_mask": masks[0]} if mask else {}
        scale = settings.get("scale")
        causal = settings.get("is_causal", False)
        given = (q, k, v, 0.0, causal)
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*given, scale=scale, **named)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(g, q, k, v, out, logsumexp, 0.0, causal, scale=scale, **named), logsumexp

    return gradients


def _attention_internal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Any:
    out, logsumexp = internal.ATTENTION(q, k, v, None, True, None)
    return internal.ATTENTION_BACKWARD(g, q, k, v, None, out, logsumexp, True, None), logsumexp


SAME = [floats(2, 3, None, 4)] * 4
CROSS = [lengths("2", "3", size, "4") for size in ("s", "s+1", "s+1", "s")]
LONGER = [lengths("2", "3", size, "4") for size in ("2*s+1", "s", "s", "2*s+1")]
ATTENTION = [
    case("attention_backward", "attention_backward", _attention(), *SAME),
    case("attention_backward", "attention_backward_causal", _attention(is_causal=True), *SAME),
    case("attention_backward", "attention_backward_causal_more_keys", _attention(is_causal=True), *CROSS),
    case("attention_backward", "attention_backward_causal_more_queries", _attention(is_causal=True), *LONGER),
    case("attention_backward", "attention_backward_scaled", _attention(scale=0.3), *SAME),
    case("attention_backward", "attention_backward_batch", _attention(), *[floats(None, 3, 2, 4)] * 4),
    case("attention_backward", "attention_backward_cross", _attention(), *CROSS),
    case("attention_backward", "attention_backward_half", _attention(), *[floats(2, 3, None, 4, dtype=HALF)] * 4),
    case("attention_backward", "attention_backward_mask", _attention(True), *SAME, lambda s: torch.randn(s, s)),
    case(
        "attention_backward",
        "attention_backward_row_mask",
        _attention(True),
        *SAME,
        lambda s: torch.where(torch.arange(s) < s - 1, 0.0, -torch.inf).expand(2, 1, s, s).contiguous(),
    ),
    case(
        "attention_backward",
        "attention_backward_apart",
        lambda x, g: _attention()(x.flatten(0, 1), *[numbered(2 * x.shape[1], 3, 5, 4)] * 2, g),
        floats(2, None, 3, 2, 4),
        lengths("2*s", "3", "2", "4"),
    ),
    case("attention_backward", "attention_backward_internal", _attention_internal, *SAME),
    case(
        "attention_backward",
        "attention_backward_shared",
        _attention_internal,
        *[lengths("2", heads, "s", "4") for heads in ("4", "2", "2", "4")],
    ),
]
ALIGNED = [
    case(
        "nll_loss",
        "cross_entropy_merged",
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y),
        floats(3, None, 4),
        lambda s: torch.randint(0, 4, (3 * s,)),
        sizes=THREEFOLD,
    ),
    case(
        "loss",
        "mse_merged",
        lambda x, y: F.mse_loss(x.flatten(0, 1), y),
        floats(3, None, 2),
        lambda s: torch.randn(3 * s, 2),
        sizes=THREEFOLD,
    ),
    case(
        "product",
        "weight_gradient",
        lambda g, x: g.flatten(0, 1).t() @ x,
        floats(3, None, 2),
        lambda s: torch.randn(3 * s, 6),
        sizes=THREEFOLD,
    ),
    case(
        "product",
        "weight_gradient_two",
        lambda g, x: g.flatten(0, 1).t() @ x,
        lengths("s", "s+1", "2"),
        lengths("s*(s+1)", "6"),
        sizes=SQUARED,
    ),
    case(
        "elementwise",
        "gelu_backward_merged",
        lambda g, x: aten.gelu_backward(g.flatten(0, 1), x).view(g.shape).sum((0, 1)),
        floats(3, None, 2),
        lambda s: torch.randn(3 * s, 2),
        sizes=THREEFOLD,
    ),
    case(
        "view",
        "view_of_run",
        lambda x: x.view(3, -1, 2).sum(1),
        lambda s: torch.randn(3 * s, 2),
        sizes=THREEFOLD,
    ),
    case(
        "view",
        "view_of_run_two",
        lambda x, y: x.view(y.shape).softmax(1) + y,
        lengths("s*(s+1)"),
        lengths("s", "s+1"),
        sizes=SQUARED,
    ),
    case(
        "linear",
        "linear_merged",
        lambda x, w: F.linear(x.flatten(), w),
        floats(3, None),
        lambda s: torch.randn(2, 3 * s),
        sizes=THREEFOLD,
    ),
]


CASES: list[Case] = [*SOFTMAX, *LOSSES, *POSITIONS, *ATTENTION, *ALIGNED]
