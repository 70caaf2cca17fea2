"""Cases of reductions, orders, windows and indexing."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.bucketing.plain_cases import bools, floats, ints, lengths, special
from tests.bucketing.poison import Case, Make, case


def all_nan_row(s: int) -> torch.Tensor:
    x = torch.randn(3, s)
    x[1] = float("nan")
    return x


def all_negative_infinity_row(s: int) -> torch.Tensor:
    x = torch.randn(3, s)
    x[1] = -float("inf")
    return x


def distinct(*shape: int | None) -> Make:
    """No two equal values: torch leaves open which of several equal elements some ops point at."""

    def make(s: int) -> torch.Tensor:
        sizes = [s if d is None else d for d in shape]
        count = int(torch.tensor(sizes).prod())
        return (torch.randperm(count) - count // 2).float().view(sizes)

    return make


def near_one(*shape: int | None, dtype: torch.dtype = torch.float32) -> Make:
    """Values whose sums do not cancel."""
    return lambda s: (torch.randn([s if d is None else d for d in shape]) / 4 + 1).to(dtype)


def ties(s: int) -> torch.Tensor:
    return torch.randint(-1, 2, (3, s)).float()


HALF = torch.bfloat16
REDUCTIONS = [
    case("reduction", "sums", lambda x: (x.sum(0), x.sum(1), x.sum(), x.sum((0, 1), keepdim=True)), near_one(None, 6)),
    case("reduction", "sums_half", lambda x: (x.sum(0), x.sum()), near_one(None, 6, dtype=HALF)),
    case("reduction", "sums_double", lambda x: (x.sum(0), x.sum()), floats(None, 6, dtype=torch.float64)),
    case("reduction", "sums_whole", lambda x: (x.sum(0), x.sum(), x.prod(0)), ints(None, 6)),
    case("reduction", "sums_bool", lambda x: (x.sum(0), x.sum()), bools(None, 6)),
    case("reduction", "sum_dtype", lambda x: x.sum(0, dtype=torch.float64), floats(None, 6)),
    case("reduction", "nansum", lambda x: (x.nansum(0), x.nansum()), all_nan_row),
    case("reduction", "prod", lambda x: (x.prod(0), x.prod()), floats(None, 3)),
    case("reduction", "extremes", lambda x: (x.amax(0), x.amin(0), x.amax((0, 1)), x.max(), x.min()), floats(None, 6)),
    case("reduction", "extremes_special", lambda x: (x.amax(0), x.amin(1), x.max(), x.min()), special(None, 6)),
    case("reduction", "extremes_whole", lambda x: (x.amax(0), x.amin(0), x.max(), x.min()), ints(None, 6)),
    case("reduction", "extremes_int32", lambda x: (x.amax(0), x.amin(1)), ints(None, 6, dtype=torch.int32)),
    case("both_extremes", "aminmax", lambda x: (*x.aminmax(), *x.aminmax(dim=0)), special(None, 6)),
    case("both_extremes", "aminmax_kept_dims", lambda x: (*x.aminmax(dim=0, keepdim=True), *x.T.aminmax(dim=1)), ints(None, 6)),
    case("both_extremes", "aminmax_bools", lambda x: (*x.aminmax(dim=0), *x.aminmax()), bools(None, 6)),
    case("reduction", "extremes_bool", lambda x: (x.amax(0), x.amin(0)), bools(None, 6)),
    case("reduction", "max_min_dim", lambda x: (x.max(1), x.min(1), x.max(0)), ties),
    case("reduction", "max_dim_special", lambda x: (x.max(1), x.min(1)), special(3, None)),
    case("reduction", "max_dim_lowest", lambda x: (x.max(1), x.min(1)), all_negative_infinity_row),
    case("reduction", "max_dim_whole", lambda x: (x.max(1), x.min(0)), ints(3, None)),
    case("reduction", "lowest_whole", lambda x: (x.max(1), x.argmax(1)), lambda s: torch.full((3, s), -(2**63))),
    case("reduction", "argmax", lambda x: (x.argmax(1), x.argmin(1), x.argmax(0, keepdim=True)), ties),
    case("reduction", "argmax_nan", lambda x: (x.argmax(1), x.argmin(1)), all_nan_row),
    case("reduction", "argmax_whole", lambda x: (x.argmax(1), x.argmin(1)), ints(3, None)),
    case("reduction", "argmax_flat", lambda x: (x.argmax(), x.argmin()), floats(None, 3)),
    case("reduction", "argmax_merged", lambda x: x.reshape(-1).argmax(), floats(None, 3)),
    case("reduction", "any_all", lambda x: (x.any(0), x.all(0), x.any(), x.all(), x.any((0, 1))), bools(None, 6)),
    case("reduction", "any_all_floats", lambda x: (x.any(0), x.all(1)), special(None, 6)),
    case("reduction", "all_true", lambda x: (x.all(), x.all(0), (~x).any(1)), lambda s: torch.ones(s, 6).bool()),
    case("reduction", "count_nonzero", lambda x: (x.count_nonzero(0), x.count_nonzero()), ints(None, 6, low=-1, high=2)),
    case("reduction", "logsumexp", lambda x: (x.logsumexp(0), x.logsumexp((0, 1), keepdim=True)), floats(None, 6)),
    case("reduction", "logsumexp_bool", lambda x: x.logsumexp(0), bools(None, 6)),
    case("reduction", "logsumexp_whole", lambda x: x.logsumexp(1), lambda s: torch.full((3, s), -128, dtype=torch.int8)),
    case("reduction", "logsumexp_lowest", lambda x: x.logsumexp(1), all_negative_infinity_row),
    case("reduction", "norms", lambda x: (x.norm(), x.norm(dim=0), x.norm(1, dim=1), x.norm(3, 1)), floats(None, 6)),
    case(
        "reduction", "norms_other",
        lambda x: [torch.linalg.vector_norm(x, order, 0) for order in (0, -1, 0.5, float("inf"), -float("inf"))],
        floats(None, 6),
    ),
    case("reduction", "normalize", lambda x: F.normalize(x, dim=1).sum(0), floats(None, 6)),
    case("mean", "means", lambda x: (x.mean(0), x.mean(1), x.mean(), x.mean((0, 1), keepdim=True)), near_one(None, 6)),
    case("mean", "mean_half", lambda x: (x.mean(0), x.mean()), near_one(None, 6, dtype=HALF)),
    case("mean", "mean_of_whole", lambda x: x.mean(0, dtype=torch.float32), ints(None, 6)),
    case("mean", "mean_two_sizes", lambda x: x.mean((0, 2)), lengths("s", "3", "s+1")),
    case("loss", "mse_loss", lambda x, y: F.mse_loss(x, y), floats(None, 6), floats(None, 6)),
    case("variance", "variances", lambda x: (x.var(0), x.std(1), x.var(), torch.var_mean(x, 0)), floats(None, 6)),
    case("variance", "variances_other", lambda x: (x.var(0, correction=0), x.std((0, 1), keepdim=True)), floats(None, 6)),
    case("variance", "variance_half", lambda x: x.var(0), floats(None, 6, dtype=HALF)),
    case("variance", "variance_none", lambda x: x.var(0, correction=3), floats(None, 6), sizes=(5, 9, 17)),
    case("softmax", "softmax", lambda x: (x.softmax(0), x.softmax(1), x.log_softmax(0)), floats(None, 6)),
    case("softmax", "softmax_special", lambda x: x.softmax(1), special(3, None)),
    case("softmax", "softmax_lowest", lambda x: (x.softmax(1), x.log_softmax(1)), all_negative_infinity_row),
    case("softmax", "softmax_half", lambda x: x.softmax(0), floats(None, 6, dtype=HALF)),
    case("softmax", "softmax_then_sum", lambda x: x.softmax(1) @ x.t(), floats(3, None)),
    case("softmax", "softmax_dtype", lambda x: x.softmax(0, dtype=torch.float64), floats(None, 6)),
]  # fmt: skip
ORDERS = [
    case("cumulative", "cumsum", lambda x: (x.cumsum(0), x.cumsum(1)), floats(None, 6)),
    case("cumulative", "cumsum_whole", lambda x: (x.cumsum(0), x.cumprod(0)), ints(None, 3, low=-2, high=3)),
    case("cumulative", "cumsum_bool", lambda x: x.cumsum(0) - 1, bools(None, 3)),
    case("cumulative", "cumprod", lambda x: x.cumprod(0), floats(None, 6)),
    case("cumulative", "cummax", lambda x: (x.cummax(1), x.cummin(1)), floats(3, None)),
    case("cumulative", "logcumsumexp", lambda x: x.logcumsumexp(0), floats(None, 6)),
    case("cumulative", "cumsum_merged", lambda x: x.reshape(-1).cumsum(0), floats(None, 3)),
    case("sort", "sort", lambda x: (x.sort(1), x.sort(0), x.argsort(1)), floats(3, None)),
    case("sort", "sort_ties", lambda x: x.sort(stable=True, dim=1), special(3, None)),
    case("sort", "sort_ties_descending", lambda x: x.sort(stable=True, dim=1, descending=True), special(3, None)),
    case("sort", "sort_descending", lambda x: (x.sort(1, descending=True), x.argsort(1, descending=True)), distinct(3, None)),
    case("sort", "sort_whole", lambda x: (x.sort(stable=True, dim=1), x.sort(1, True)[0]), ints(3, None)),
    case("sort", "sort_bool", lambda x: (x.sort(1)[0], x.sort(1, True)[0]), bools(3, None)),
    case("sort", "sort_lowest", lambda x: x.sort(stable=True, dim=1, descending=True), lambda s: torch.full((3, s), -(2**63))),
    case("sort", "sort_merged", lambda x: x.reshape(-1).sort()[0], floats(None, 3)),
    case("topk", "topk", lambda x: (x.topk(2, 1), x.topk(2, 1, largest=False)), distinct(3, None)),
    case("topk", "topk_values", lambda x: (x.topk(2, 1)[0], x.topk(2, 1, largest=False)[0]), special(3, None)),
    case("topk", "topk_lowest", lambda x: x.topk(2, 1)[0], all_negative_infinity_row),
    case("topk", "topk_whole", lambda x: (x.topk(2, 1)[0], x.topk(2, 1, largest=False)[0]), ints(3, None)),
    case("topk", "topk_batch", lambda x: x.topk(2, 1), distinct(None, 4)),
]  # fmt: skip


class _Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Conv1d(4, 3, 3, padding=1, stride=2)
        self.image = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.wide = torch.nn.Conv2d(4, 2, 2, dilation=2, padding=2, bias=False)
        self.grouped = torch.nn.Conv1d(4, 4, 2, groups=2)
        self.batch = torch.nn.BatchNorm2d(4).eval()


NETS = _Convolutions()
LONG = (5, 3, 7, 9, 12, 16, 17, 31)
WINDOWS = [
    case("convolution", "conv1d", lambda x: NETS.line(x), floats(2, 4, None)),
    case("convolution", "conv1d_grouped", lambda x: NETS.grouped(x).sum(2), floats(2, 4, None), sizes=LONG),
    case("convolution", "conv2d", lambda x: NETS.image(x), lengths("2", "4", "s", "s+2"), sizes=(5, 7, 9, 12, 17)),
    case("convolution", "conv2d_twice", lambda x: NETS.image(NETS.image(x).relu()), floats(2, 4, None, 3)),
    case("convolution", "conv2d_dilated", lambda x: NETS.wide(x), floats(2, 4, None, 3)),
    case(
        "convolution",
        "conv2d_batch",
        lambda x: NETS.image(x).sum(0),
        floats(None, 4, 4, 3),
        sizes=(5, 7, 9, 12, 15),
    ),
    case("permute_weight", "weights_vary", lambda x, w: F.conv1d(x, w), floats(2, 3, 4), floats(None, 3, 2)),
    case("max_pool", "max_pool_rows", lambda x: F.max_pool2d(x, (2, 1)), floats(2, 4, None, 3)),
    case("max_pool", "max_pool_whole", lambda x: F.max_pool2d(x, (2, 1)), ints(2, 4, None, 3)),
    case("max_pool", "max_pool2d", lambda x: F.max_pool2d(x, 3, 1, 1), floats(2, 4, None, 3)),
    case("max_pool", "max_pool2d_alone", lambda x: F.max_pool2d(x, 3, 1, 1), floats(4, None, 3)),
    case("max_pool", "max_pool2d_batch", lambda x: F.max_pool2d(x, 2, return_indices=True), floats(None, 3, 4, 4)),
    case("avg_pool", "avg_pool2d_batch", lambda x: F.avg_pool2d(x, 2).sum(0), floats(None, 3, 4, 4)),
    case("adaptive_pool", "adaptive_batch", lambda x: F.adaptive_avg_pool2d(x, 2), floats(None, 3, 4, 3)),
    case("adaptive_pool", "adaptive_max", lambda x: F.adaptive_max_pool2d(x, 2), floats(None, 3, 4, 3)),
    case("view", "pixel_shuffle", lambda x: F.pixel_shuffle(x, 2) + 1, floats(None, 4, 2, 4)),
]
INDEXING = [
    case("embedding", "embedding", lambda i, w: F.embedding(i, w).sum(0), ints(None, low=0, high=4), floats(4, 6)),
    case("embedding", "embedding_varies", lambda i, w: F.embedding(i, w), ints(3, low=0, high=2), floats(None, 6)),
    case("gather", "gather", lambda x, i: x.gather(1, i), floats(3, None), ints(3, None, low=0, high=2)),
    case("gather", "gather_fewer", lambda x, i: x.gather(1, i), floats(3, None), ints(3, 4, low=0, high=2)),
    case(
        "gather", "pick_labels", lambda x, i: x.gather(1, i[:, None]).sum(), floats(None, 4), ints(None, low=0, high=4)
    ),
    case("gather", "last_token", lambda x, n: x.gather(1, (n - 1)[:, None]), floats(3, None), ints(3, low=1, high=3)),
    case("index_select", "index_select", lambda x, i: x.index_select(0, i), floats(None, 6), ints(None, low=0, high=2)),
    case("index", "index", lambda x, i: (x[i], x[:, i % 3]), floats(None, 3), ints(None, low=-2, high=2)),
    case("index", "index_two", lambda x, i: x[i, i], floats(None, 4), ints(None, low=-2, high=2)),
    case("index", "index_last", lambda x: x[torch.arange(3), torch.tensor([-1, 0, -2])], floats(3, None, 6)),
    case("index", "index_int32", lambda x, i: x[i], floats(None, 6), ints(None, low=-2, high=2, dtype=torch.int32)),
    case("concatenate", "cat", lambda x, y: torch.cat([x, y, x], 1).cumsum(1), floats(3, None), lengths("3", "s+2")),
    case("concatenate", "cat_fixed", lambda x, y: torch.cat([y, x], 1), floats(3, None), floats(3, 4)),
    case("concatenate", "cat_beside", lambda x, y: torch.cat([x, y], 1).sum(0), floats(None, 3), floats(None, 4)),
    case("concatenate", "cat_dtypes", lambda x, y: torch.cat([x, y]), ints(None, 3), floats(None, 3)),
    case("concatenate", "cat_sum", lambda x, y: torch.cat([x, y]).sum(0), floats(None, 3), lengths("s+1", "3")),
    case("stack", "stack", lambda x: (torch.stack([x, x + 1]), torch.stack([x, x], 1).sum(2)), floats(None, 3)),
    case(
        "stack",
        "stack_merged",
        lambda x: torch.stack([x.flatten(), torch.arange(x.numel()) + 0.5]).sum(0),
        floats(3, None),
    ),
    case(
        "masked_scatter",
        "masked_scatter",
        lambda x, y: (x.masked_scatter(x > 0, y), x.masked_scatter(x[:, :1] > 0, y * 2)),
        floats(3, None),
        floats(3, None),
    ),
    case(
        "masked_scatter",
        "masked_scatter_rows",
        lambda x, y: x.masked_scatter((x[..., :1] > 0).expand_as(x), y).sum(1),
        floats(2, None, 3),
        floats(None, 6),
    ),
    case(
        "masked_scatter_backward",
        "read_by_a_mask",
        lambda x, y: torch.ops.aten.masked_scatter_backward(x, x > 0, [y.shape[0], 3]).sum(1),
        floats(4, None),
        floats(None, 3),
    ),
    case(
        "masked_scatter_backward",
        "read_by_a_mask_of_rows",
        lambda x, y: torch.ops.aten.masked_scatter_backward(x, (x[:, :1] > 0).expand_as(x), [2, *y.shape]).cumsum(2),
        floats(None, 4),
        floats(3, None),
    ),
    case(
        "masked_scatter_backward",
        "read_by_an_empty_mask",
        lambda x: (torch.ops.aten.masked_scatter_backward(x, x > 9, [0, 4]), x.sum(0)),
        floats(None, 4),
    ),
    case("nonzero_static", "nonzero_static", lambda x: torch.nonzero_static(x > 0, size=7), floats(3, None, 2)),
    case(
        "nonzero_static",
        "nonzero_static_by_size",
        lambda x: torch.nonzero_static(x.reshape(-1), size=x.shape[0], fill_value=-3),
        ints(None, 4, low=-1, high=2),
    ),
    case("concatenate", "cat_cropped", lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), floats(3, None)),
    case("pad", "pad", lambda x: (F.pad(x, (2, 3)).cumsum(1), F.pad(x, (0, 2), value=-1.5)), floats(3, None)),
    case("pad", "pad_whole", lambda x: F.pad(x, (1, 0, 0, 1), value=7).sum(0), ints(3, None)),
    case("pad", "pad_bool", lambda x: F.pad(x, (0, 1), value=True).all(1), bools(3, None)),
    case("flip", "flip", lambda x: (x.flip(0), x.flip((0, 1)), x.flip(1)), floats(None, 6)),
    case("flip", "flip_merged", lambda x: x.reshape(-1).flip(0), lengths("s", "s+1")),
    case("triangle", "triangles", lambda x: (x.tril(), x.triu(1), x.tril(-1).sum(0)), floats(None, None)),
    case("triangle", "triangles_batch", lambda x: x.triu().sum(0), lengths("s", "s+1", "s+2"), sizes=(5, 7, 9, 12)),
]
CASES: list[Case] = [*REDUCTIONS, *ORDERS, *WINDOWS, *INDEXING]
