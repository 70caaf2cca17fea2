"""Cases of writes by position, statistics of a batch, losses, and tensors taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.bucketing.data_cases import distinct
from tests.bucketing.plain_cases import bools, floats, ints, lengths, special
from tests.bucketing.poison import Case, Make, case

Function = Callable[..., Any]


def permutation(s: int) -> torch.Tensor:
    """Positions 0..s - 1, each once: torch leaves open which of two writes to a place stays."""
    return torch.randperm(s)


def permutations(*shape: int | None, dim: int) -> Make:
    return lambda s: torch.rand([s if d is None else d for d in shape]).argsort(dim)


def _put(accumulate: bool = False) -> Function:
    def write(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.index_put((i,), v, accumulate)

    return write


def _put_negative(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.index_put((torch.tensor([-1, 0]),), v)


def _write_last(x: torch.Tensor) -> torch.Tensor:
    x[:, -1] = 5
    return x.sum(1)


def _write_middle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:, 1:-1] = y[:, 2:]
    return x * 2


def _write_steps(x: torch.Tensor) -> torch.Tensor:
    x[:, ::2] = x[:, ::2] + 1
    return x + 0


def _write_mask(x: torch.Tensor) -> torch.Tensor:
    x[x > 0] = 0
    return x.sum()


WRITES = [
    case("index_put", "index_put", _put(), floats(None, 6), permutation, floats(None, 6)),
    case("index_put", "index_put_add", _put(True), floats(4, 6), ints(None, low=-4, high=4), floats(None, 6)),
    case("index_put", "index_put_into", _put(True), floats(None, 3), ints(4, low=-2, high=2), floats(4, 3)),
    case(
        "index_put",
        "index_put_int32",
        _put(True),
        floats(4, 6),
        ints(None, low=-4, high=4, dtype=torch.int32),
        floats(6),
    ),
    case("index_put", "index_put_negative", _put_negative, floats(None, 6), floats(2, 6)),
    case(
        "index_put",
        "index_put_two",
        lambda x, i: x.index_put((i, i), x[0, 0], True),
        floats(None, 4),
        ints(3, low=-2, high=2),
    ),
    case("index_put", "index_put_whole", _put(True), ints(4), ints(None, low=-4, high=4), ints(None)),
    case("index_put", "write_mask", _write_mask, floats(None, 6)),
    case(
        "scatter",
        "scatter",
        lambda x, i, v: x.scatter(0, i, v),
        floats(None, 6),
        permutations(None, 6, dim=0),
        floats(None, 6),
    ),
    case("scatter", "scatter_value", lambda x, i: x.scatter(1, i, 3.0), floats(3, None), ints(3, 2, low=0, high=2)),
    case(
        "scatter",
        "scatter_add",
        lambda x, i, v: x.scatter_add(1, i, v),
        floats(3, 4),
        ints(3, None, low=0, high=4),
        floats(3, None),
    ),
    case(
        "scatter",
        "scatter_add_into",
        lambda x, i: x.scatter_add(1, i, i.float()),
        floats(3, None),
        ints(3, 4, low=0, high=2),
    ),
    case(
        "scatter",
        "histogram",
        lambda i: torch.zeros(4).scatter_add(0, i, torch.ones_like(i, dtype=torch.float32)),
        ints(None, low=0, high=4),
    ),
    *[
        case(
            "scatter",
            f"scatter_{how}",
            lambda x, i, v, how=how: x.scatter_reduce(0, i, v, how, include_self=how != "mean"),
            floats(4, 3),
            ints(None, 3, low=0, high=4),
            floats(None, 3),
        )
        for how in ("sum", "prod", "mean", "amax", "amin")
    ],
    case(
        "scatter",
        "index_add",
        lambda x, i, v: x.index_add(0, i, v),
        floats(4, 6),
        ints(None, low=0, high=4),
        floats(None, 6),
    ),
    case("scatter", "index_copy", lambda x, i, v: x.index_copy(0, i, v), floats(None, 6), permutation, floats(None, 6)),
    case(
        "scatter",
        "index_fill from the end",
        lambda x, i: x.index_fill(1, i, 2.0),
        floats(3, None),
        lambda s: torch.tensor([-1, 0, -2]),
    ),
    case("scatter", "index_fill", lambda x, i: x.index_fill(1, i, 2.0), floats(3, 4), ints(None, low=0, high=4)),
    case("select_scatter", "write_last", _write_last, floats(3, None)),
    case("slice_scatter", "write_middle", _write_middle, floats(3, None), floats(3, None), sizes=(5, 7, 9, 12, 17)),
    case("slice_scatter", "write_steps", _write_steps, floats(3, None)),
]
PIECES = [
    case("stack", "stack_and_sum", lambda x: torch.stack([x, x * 2], 1).sum((0, 1)), floats(None, 3)),
    case("unbind", "unbind_beside", lambda x: [p.sum(0) for p in x.unbind(1)], floats(None, 3)),
    case("roll", "roll", lambda x: (x.roll(1, 1), x.roll(-2, 1), x.roll((1, -1), (0, 1))), floats(3, None)),
    case("roll", "roll_by_size", lambda x: x.roll(x.shape[1] // 2, 1), floats(3, None)),
    case(
        "split",
        "split_fixed_pieces",
        lambda x: [p.sum(1) for p in x.split([2, x.shape[1] - 2], 1)],
        floats(3, None),
        sizes=(5, 7, 9, 12, 17),
    ),
    case("repeat", "repeat_sum", lambda x: (x.repeat(3, 2).sum(0), x.repeat(2, 1, 1).amax((0, 1))), floats(None, 3)),
    case("repeat", "tile", lambda x: x.tile((2,)).softmax(0), floats(None)),
]


def _batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, training=True)


LAYERS = [
    case("batch_norm_training", "batch_norm", _batch_norm, floats(None, 4), floats(4), lambda s: torch.rand(4) + 1),
    case(
        "batch_norm_training",
        "batch_norm_image",
        _batch_norm,
        lengths("s", "4", "s+1", "3"),
        floats(4),
        lambda s: torch.rand(4) + 1,
        sizes=(5, 7, 9, 12),
    ),
    case("batch_norm_training", "instance_norm", lambda x: F.instance_norm(x), floats(2, 3, None)),
    case("group_norm", "group_norm", lambda x, w: F.group_norm(x, 2, w, w), floats(2, 4, None), floats(4)),
    case(
        "group_norm",
        "group_norm_image",
        lambda x: F.group_norm(x, 2).sum((0, 2)),
        lengths("s", "4", "s+1", "3"),
        sizes=(5, 7, 9),
    ),
    case("group_norm", "group_norm_half", lambda x: F.group_norm(x, 2), floats(2, 4, None, dtype=torch.bfloat16)),
    case("group_norm", "group_norm_batch", lambda x: F.group_norm(x, 2).sum(2), floats(None, 4, 3)),
]
REDUCTION_NAMES = ("mean", "sum", "none")
LOSSES = [
    *[
        case(
            "loss",
            f"mse_{how}",
            lambda x, y, how=how: F.mse_loss(x, y, reduction=how),
            floats(None, 6),
            floats(None, 6),
        )
        for how in REDUCTION_NAMES
    ],
    case("loss", "smooth_l1", lambda x, y: F.smooth_l1_loss(x, y), floats(None, 6), floats(None, 6)),
    case("loss", "huber", lambda x, y: F.huber_loss(x, y), floats(None, 6), floats(None, 6)),
    case("loss", "bce", lambda x, y: F.binary_cross_entropy_with_logits(x, y), floats(None, 6), floats(None, 6)),
    *[
        case(
            "nll_loss",
            f"cross_entropy_{how}",
            lambda x, y, how=how: F.cross_entropy(x, y, ignore_index=2, reduction=how),
            floats(None, 4),
            ints(None, low=0, high=4),
        )
        for how in REDUCTION_NAMES
    ],
    case(
        "nll_loss",
        "cross_entropy_weighted",
        lambda x, y, w: F.cross_entropy(x, y, w),
        floats(None, 4),
        ints(None, low=0, high=4),
        lambda s: torch.rand(4),
    ),
    case(
        "nll_loss", "cross_entropy_classes", lambda x, y: F.cross_entropy(x, y), floats(3, None), ints(3, low=0, high=2)
    ),
    case(
        "nll_loss",
        "cross_entropy_image",
        lambda x, y: F.cross_entropy(x, y, ignore_index=1),
        floats(2, 4, None, 3),
        ints(2, None, 3, low=0, high=4),
    ),
    case(
        "softmax",
        "cross_entropy_smooth",
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        floats(None, 4),
        ints(None, low=0, high=4),
    ),
]
ORDERS = [
    case("kth_value", "kthvalue", lambda x: (x.kthvalue(2, 1), x.kthvalue(1, 1, keepdim=True)[0]), distinct(3, None)),
    case("kth_value", "kthvalue_special", lambda x: x.kthvalue(2, 1)[0], special(3, None)),
    case("median", "median", lambda x: (x.median(1), x.median(1, keepdim=True)[0]), distinct(3, None)),
    case("median", "median_whole", lambda x: (x.median(0)[0], x.median()), ints(None, 3)),
    case("median", "median_special", lambda x: x.median(1)[0], special(3, None)),
    case("median", "median_flat", lambda x: x.median(), lengths("s", "s+1")),
    case("search", "bucketize", lambda x, b: torch.bucketize(x, b.sort()[0]), floats(None, 3), floats(4)),
    case(
        "search",
        "bucketize_rows",
        lambda x, b: torch.bucketize(x, b.sort()[0], right=True),
        special(None),
        ints(None),
    ),
    case("search", "searchsorted", lambda x, b: torch.searchsorted(b.sort(1)[0], x), floats(3, 4), floats(3, None)),
    case(
        "search",
        "searchsorted_special",
        lambda x, b: torch.searchsorted(b.sort(1)[0], x, right=True),
        special(3, 4),
        special(3, None),
    ),
    case("search", "bucketize_of_any_order", lambda x, b: torch.bucketize(x, b), floats(7), floats(None)),
]
WINDOWS = [
    case("avg_pool", "avg_pool", lambda x: F.avg_pool2d(x, (2, 1)), floats(2, 3, None, 3)),
    case("avg_pool", "avg_pool_edge", lambda x: F.avg_pool2d(x, 3, 1, 1), floats(2, 3, None, 3)),
    case(
        "avg_pool",
        "avg_pool_uncounted",
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        floats(2, 3, None, 3),
    ),
    case("avg_pool", "avg_pool_alone", lambda x: F.avg_pool2d(x, 3, 1, 1), floats(3, None, 3)),
    case("avg_pool", "avg_pool_divisor", lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=2), floats(2, 3, None, 3)),
    case("avg_pool", "avg_pool1d", lambda x: F.avg_pool1d(x, 2, 1), floats(2, 3, None), sizes=(5, 7, 9, 12, 17)),
    case("mean", "adaptive_to_one", lambda x: F.adaptive_avg_pool2d(x, 1), lengths("2", "3", "s", "s+1")),
    case("unfold", "unfold", lambda x: x.unfold(1, 2, 1).sum(1), floats(3, None)),
    case(
        "unfold",
        "unfold_steps",
        lambda x: (x.unfold(1, 3, 2) + 1, x.unfold(0, 2, 1).sum(1)),
        floats(4, None),
        sizes=(7, 9, 12, 17),
    ),
    case(
        "diagonal",
        "diagonal",
        lambda x: (x.diagonal().sum(), x.diagonal(1, 0, 1) * 2),
        lengths("s", "s+1"),
        sizes=(5, 7, 9, 12),
    ),
    case("diagonal", "diag", lambda x: x.diag().cumsum(0), lengths("s", "s")),
    case("glu", "glu", lambda x: F.glu(x, 1), floats(None, 4)),
    case(
        "cdist",
        "cdist",
        lambda x, y: torch.cdist(x, y, 1.0),
        lengths("s", "6"),
        lengths("s+1", "6"),
        sizes=(9, 12, 14),
    ),
    case(
        "cdist",
        "cdist_batched_on_one_side",
        lambda x, y: torch.cdist(x, y, 1.0),
        lengths("s", "6"),
        lengths("3", "s+1", "6"),
        sizes=(9, 12, 14),
    ),
    case(
        "upsample",
        "resized_batch",
        lambda x: F.interpolate(x, size=(5, 6), mode="bilinear").sum(0),
        floats(None, 3, 4, 3),
    ),
    case(
        "masked_scatter",
        "masked_scatter_of_itself",
        lambda x, m: x.masked_scatter(m, x),
        floats(None, 3),
        bools(None, 3),
    ),
]
UNKNOWN = [
    case(None, "lu", lambda x: torch.linalg.lu(x)[2], floats(3, None), sizes=(5, 9)),
    case(None, "lu_factor", lambda x: torch.linalg.lu_factor_ex(x)[0], lambda s: torch.eye(s) * 2, sizes=(5, 9)),
]
CASES: list[Case] = [*WRITES, *PIECES, *LAYERS, *LOSSES, *ORDERS, *WINDOWS, *UNKNOWN]
