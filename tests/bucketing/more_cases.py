"""Cases of transforms, groups of rows, memory, and of dims that are several in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.bucketing.data_cases import distinct
from tests.bucketing.plain_cases import floats, ints, lengths
from tests.bucketing.poison import Case, Make, case

aten = torch.ops.aten
DOUBLE = torch.float64


def complexes(*shape: int | None) -> Make:
    return lambda s: torch.randn([s if d is None else d for d in shape], dtype=torch.complex64)


def _shifted_rows(x: torch.Tensor) -> torch.Tensor:
    """A row-major matrix read as the transposed shape, without its first row: each row begins one later."""
    batch, rows, columns = x.shape
    return x.reshape(batch, columns, rows)[:, 1:].reshape(batch, rows, columns - 1)


FOURIER = [
    case("fft", "fft", lambda x: torch.fft.fft(x), complexes(3, None)),
    case(
        "rfft",
        "phases_of_real_elements",
        lambda x: torch.fft.rfft(x - x.amax(1, True) - 1).angle()[:, 0],
        floats(3, None),
    ),
    case(
        "rfft",
        "phase_of_every_other",
        lambda x: torch.fft.rfft(x.cumsum(1)).angle()[:, -1],
        floats(3, None),
        sizes=(6, 8, 14),
    ),
    case("rfft", "fft_real", lambda x: torch.fft.fft(x).real + 0, floats(3, None)),
    case("rfft", "fft_beside", lambda x: torch.fft.fft(x).abs(), floats(None, 6)),
    case("fft", "fft_both", lambda x: torch.fft.fft2(x).real + 0, floats(2, None, 4)),
    case(
        "fft",
        "fft_two_sizes",
        lambda x: torch.fft.fft2(torch.complex(x, x), norm="ortho"),
        lengths("s", "s+1"),
        sizes=(5, 9, 12),
    ),
    case("fft", "ifft", lambda x: torch.fft.ifft(torch.fft.fft(x, dim=0), dim=0), complexes(None, 3)),
    case("rfft", "fft_merged", lambda x: torch.fft.fft(x.flatten(0, 1), dim=0).abs(), lengths("s", "s+1", "2")),
    case("rfft", "rfft", lambda x: torch.fft.rfft(x), floats(3, None)),
    case("rfft", "rfft_double", lambda x: torch.fft.rfft(x, norm="forward"), floats(3, None, dtype=DOUBLE)),
    case("rfft", "rfft_beside", lambda x: torch.fft.rfft(x, dim=1), floats(None, 6)),
    case("rfft", "rfft2", lambda x: torch.fft.rfft2(x), floats(3, None, 4)),
    case("rfft", "rfft2_last", lambda x: torch.fft.rfft2(x).abs(), floats(3, 4, None)),
    case(
        "irfft",
        "irfft",
        lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=x.shape[1], dim=1),
        floats(3, None, 2),
    ),
    case("irfft", "irfft_beside", lambda x: torch.fft.irfft(x, n=6), complexes(None, 4)),
    case("irfft", "irfft2", lambda x: torch.fft.irfft2(x), complexes(3, None, 4)),
    case("view_dtype", "viewed_bits", lambda x: (x.view(torch.int32) ^ 1).view(torch.float32), floats(None, 3)),
    case("view_dtype", "narrow_bits", lambda x: (x * 2).view(torch.int16).sum(1), floats(None, 3)),
    case("view_dtype", "wide_bits", lambda x: (x * 2).view(torch.int64).sum(1), floats(None, 4)),
    case("view_dtype", "bytes", lambda x: (x > 0).view(torch.uint8).sum(), floats(None, 4)),
    case("view_dtype", "varying_bits", lambda x: x.view(torch.int32).sum(0), floats(3, None)),
    case(
        "view_as_real",
        "conjugate_parts",
        lambda x: ((x + 1).conj().imag + 1, (x * 2).mH.imag.sum(1)),
        complexes(None, 3),
    ),
    case("view_as_real", "parts", lambda x: torch.view_as_real(x * 2).sum(0), complexes(None, 3)),
    case("view_as_complex", "pairs", lambda x: torch.view_as_complex(x * 2).sum(0), floats(None, 3, 2)),
]


def _bags(items: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, mode: str) -> torch.Tensor:
    return F.embedding_bag(items, weight, offsets.sort()[0] - offsets.min(), mode=mode)


def _bag_gradients(mode: int, padding: int = -1, last: bool = False) -> Callable[..., Any]:
    """Gradients of the table, and of weights of items where there are any; sums, means, maxima."""

    def gradients(
        items: torch.Tensor, offsets: torch.Tensor, table: torch.Tensor, weights: torch.Tensor | None = None
    ) -> Any:
        starts = offsets.sort()[0] - offsets.min()
        if last:
            starts = torch.cat([starts, starts.new_full((1,), items.shape[0])])
        bags, *found = aten._embedding_bag(table, items, starts, False, mode, False, weights, last, padding)
        grad = bags.sin()
        settings = (table.shape[0], False, mode)
        made = [aten._embedding_bag_backward(grad, items, starts, *found, *settings, False, weights, padding)]
        if found[0].shape[0]:
            made.append(aten._embedding_bag_dense_backward(grad, items, *found, *settings, weights, padding))
        if weights is not None:
            made.append(
                aten._embedding_bag_per_sample_weights_backward(grad, table, items, starts, found[0], mode, padding)
            )
        return made

    return gradients


EXPERTS = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(3, 16, 8).bfloat16())])


def _experts(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows, sorted by group, times the matrix of their group, and back in their order."""
    flat = chosen.reshape(-1)
    groups, order = flat.sort(stable=True)
    counts = torch.histc(groups.float(), bins=3, min=0, max=2)
    out = torch._grouped_mm(x[order // 2], EXPERTS[0], offs=counts.cumsum(0, dtype=torch.int32))
    back = torch.empty_like(out).index_put((order,), out)
    return back.view(chosen.shape[0], 2, -1).sum(1)


GROUPS = [
    case("product", "vdot", lambda x, y: torch.vdot(x, y), complexes(None), complexes(None)),
    case(
        "embedding_bag",
        "bags_weighted",
        lambda i, w, p: F.embedding_bag(
            i.reshape(-1), w, torch.tensor([0, 2, 2]), mode="sum", per_sample_weights=p.reshape(-1)
        ),
        lambda s: torch.randint(0, 4, (s, s + 1)),
        floats(4, 3),
        lengths("s", "s+1"),
        sizes=(5, 7, 9, 12),
    ),
    *[
        case(
            "embedding_bag",
            f"bags_{mode}",
            lambda i, o, w, mode=mode: _bags(i, o, w, mode),
            ints(None, low=0, high=4),
            lambda s: torch.randint(0, s, (s + 2,)),
            floats(4, 6),
        )
        for mode in ("sum", "mean", "max")
    ],
    *[
        case(
            "embedding_bag_backward",
            f"bag_gradients_{name}",
            function,
            ints(None, low=0, high=4),
            lambda s: torch.randint(0, s, (s + 2,)),
            floats(4, 6),
        )
        for name, function in {
            "sum": _bag_gradients(0),
            "mean": _bag_gradients(1, padding=2),
            "max": _bag_gradients(2),
            "to_the_last": _bag_gradients(0, last=True),
        }.items()
    ],
    *[
        case(
            "embedding_bag_per_sample_weights_backward",
            f"bag_gradients_weighted_{name}",
            function,
            ints(None, low=0, high=4),
            lambda s: torch.randint(0, s, (3,)),
            floats(4, 6),
            floats(None),
        )
        for name, function in {"all": _bag_gradients(0), "some": _bag_gradients(0, padding=2, last=True)}.items()
    ],
    case(
        "embedding_bag",
        "bags_of_few",
        lambda i, w: F.embedding_bag(i, w, torch.tensor([0, 1, 1])),
        ints(None, low=0, high=4),
        floats(4, 6),
    ),
    case(
        "grouped_product",
        "experts",
        _experts,
        floats(None, 16, dtype=torch.bfloat16),
        ints(None, 2, low=0, high=3),
    ),
    case(
        "group_products",
        "experts_backward",
        lambda x, y, i: torch.ops.dynaxla.group_products(x, y, torch.histc(i.float(), 3, 0, 2).cumsum(0).int()),
        floats(None, 16),
        floats(None, 24),
        ints(None, low=0, high=3),
    ),
    case(
        "contract_rows",
        "rows_of_two_dims",
        lambda x, y: torch.ops.dynaxla.contract_rows(x, y),
        floats(None, 3, 6),
        floats(None, 3, 8),
    ),
    case(
        "contract_rows",
        "rows_and_columns",
        lambda x, y: torch.ops.dynaxla.contract_rows(x, y),
        floats(2, None, None),
        floats(2, None, 7),
    ),
    case("histogram", "histogram_range", lambda x: torch.histc(x, 4, -1, 1), floats(None, 3)),
    case(None, "histogram_of_data", lambda x: torch.histc(x, 4), floats(None, 3), sizes=(5, 9)),
    *[
        case(
            "scatter",
            f"index_reduce_{how}",
            lambda x, i, v, how=how: x.index_reduce(0, i, v, how, include_self=how != "mean"),
            floats(4, 3),
            ints(None, low=0, high=4),
            floats(None, 3),
        )
        for how in ("prod", "mean", "amax", "amin")
    ],
]
PLACES = [
    case(
        "eye",
        "eye",
        lambda x: (torch.eye(x.shape[0]) + x, torch.eye(x.shape[0], dtype=torch.bool).any(0)),
        lengths("s", "s"),
    ),
    case("eye", "eye_wide", lambda x: torch.eye(x.shape[0], x.shape[1]).sum(0) + x.sum(0), lengths("s", "s+1")),
    case("repeat", "repeat_by_size", lambda x, y: x.repeat(y.shape[0], 1).sum(0), floats(None, 3), lengths("s+1")),
    case("repeat", "repeat_in_front", lambda x, y: x.repeat(y.shape[0], 1, 1) + 1, floats(None, 3), lengths("s+1")),
    case("roll", "roll_flat", lambda x: x.roll(3), floats(3, None)),
    case("roll", "roll_flat_back", lambda x: x.roll(-2).cumsum(0), floats(None, 4)),
    case("roll", "roll_merged", lambda x: x.reshape(-1).roll(2, 0), lengths("s", "s+1")),
    case("as_strided", "as_strided", lambda x: (x + 1).as_strided((2, 2), (1, 2)).sum(), floats(None, 3)),
    case(
        "as_strided",
        "as_strided_rows",
        lambda x: (x + 1).as_strided((x.shape[0] - 1, 2), (x.shape[1], 1), 1) + 0,
        floats(None, 3),
    ),
    case(
        "as_strided",
        "overlapping",
        lambda x: (x * 2).as_strided((x.shape[1] - 2, 3), (1, 1)).sum(1),
        lengths("2", "s+1"),
        sizes=(5, 7, 9),
    ),
    case("layer_norm", "layer_norm_varies", lambda x: F.layer_norm(x, x.shape[1:]), floats(3, None)),
    case(
        "layer_norm",
        "layer_norm_image",
        lambda x: F.layer_norm(x, x.shape[1:]).sum(0),
        lengths("s", "3", "s+1"),
        sizes=(5, 7, 9),
    ),
    case(
        "layer_norm", "layer_norm_half", lambda x: F.layer_norm(x, x.shape[1:]), floats(3, None, dtype=torch.bfloat16)
    ),
    case(
        "layer_norm",
        "layer_norm_weights",
        lambda x, w: F.layer_norm(x, x.shape[1:], w, w),
        floats(3, None),
        floats(None),
    ),
    case("slice", "half_of_it", lambda x: x[:, : 64 - max(0, 64 - x.shape[1])] + 1, floats(3, None)),
]
MERGED = [
    case("cumulative", "cumsum_interleaved", lambda x: x.reshape(-1).cumsum(0), lengths("s", "s+1")),
    case("sort", "sort_interleaved", lambda x: x.reshape(-1).sort(stable=True), lengths("s", "s+1")),
    case("sort", "sort_and_back", lambda x: x.reshape(-1).sort()[0].view(x.shape) + x, lengths("s", "s+1")),
    case("topk", "topk_interleaved", lambda x: x.reshape(-1).topk(3), lambda s: distinct(s, s + 1)(s)),
    case("reduction", "argmax_interleaved", lambda x: (x.reshape(-1).argmax(), x.argmin()), lengths("s", "s+1")),
    case("reduction", "argmax_flat_between", lambda x: (x.argmax(), x.argmin(keepdim=True)), floats(3, None)),
    case("reduction", "max_interleaved", lambda x: x.flatten(0, 1).max(0), lengths("s", "s+1", "2")),
    case(
        "select",
        "select_of_interleaved",
        lambda x: x.reshape(-1)[13] + x.reshape(-1)[-2],
        lengths("s+3", "s+4"),
        sizes=(5, 9, 17),
    ),
    case(
        "slice",
        "slice_interleaved",
        lambda x: (x.reshape(-1)[3:] + 1, x.flatten(0, 1)[-4:-1]),
        lengths("s", "s+1"),
        sizes=(5, 9),
    ),
    case(
        "gather",
        "gather_interleaved",
        lambda x, i: x.reshape(-1).gather(0, i),
        lengths("s", "s+1"),
        ints(None, low=0, high=9),
    ),
    case(
        "index",
        "index_interleaved",
        lambda x, i: (x.flatten(0, 1)[i], x.reshape(-1)[-i]),
        lengths("s", "s+1"),
        ints(None, low=0, high=9),
    ),
    case(
        "embedding",
        "embedding_interleaved",
        lambda i, w: F.embedding(i, w.flatten(0, 1)),
        ints(3, low=0, high=6),
        lengths("s", "s+1", "2"),
    ),
    case(
        "concatenate", "cat_interleaved", lambda x: torch.cat([x.reshape(-1), x[0], x.reshape(-1)]), lengths("s", "s+1")
    ),
    case(
        "search",
        "search_interleaved",
        lambda x, b: torch.bucketize(x, b.reshape(-1).sort()[0]),
        floats(3),
        lengths("s", "s+1"),
    ),
    case("median", "median_interleaved", lambda x: x.reshape(-1).median(0), lambda s: distinct(s, s + 1)(s)),
    case("kth_value", "kth_interleaved", lambda x: x.reshape(-1).kthvalue(5), lambda s: distinct(s, s + 1)(s)),
    case(
        "diagonal",
        "diagonal_interleaved",
        lambda x: x.flatten(0, 1).diagonal() + 1,
        lengths("s", "s+1", "s+2"),
        sizes=(5, 9),
    ),
    case(
        "triangle", "triangle_interleaved", lambda x: x.flatten(0, 1).tril(1), lengths("s", "s+1", "s+2"), sizes=(5, 9)
    ),
    case(
        "unfold",
        "unfold_interleaved",
        lambda x: x.reshape(-1).unfold(0, 3, 2).sum(1),
        lengths("s", "s+1"),
        sizes=(5, 9),
    ),
    case(
        "split",
        "split_interleaved",
        lambda x: [p.cumsum(0) for p in x.reshape(-1).split([3, x.numel() - 3])],
        lengths("s", "s+1"),
        sizes=(5, 9),
    ),
    case(
        "elementwise",
        "sizes_alone",
        lambda x: torch.div(torch.tensor(x.shape[0]), 2, rounding_mode="floor") + x,
        floats(None),
    ),
]
NORM = torch.nn.InstanceNorm2d(3, affine=True)
PIECES = [
    case(
        "concatenate",
        "cat_of_other_layouts",
        lambda x, y: torch.cat([x.reshape(-1, 3), y * 2], 1).sum(1),
        lengths("s", "4", "3"),
        lengths("4*s", "2"),
        sizes=(5, 9, 12),
    ),
    case(
        "arange",
        "arange_halves",
        lambda x: torch.arange(0.5, x.shape[0], dtype=torch.float32) / x.shape[0],
        floats(None),
    ),
    case("arange", "arange_tenths", lambda x: torch.arange(1, x.shape[0], 0.1).cumsum(0), floats(None), sizes=(5, 9)),
    case("slice_scatter", "write_nothing", lambda x: x.slice_scatter(x[:, :0], 1, 2, 2) + 1, floats(3, None)),
    case("concatenate", "cat_with_none", lambda x: torch.cat([x, x[:0], x]).sum(0), floats(None, 3)),
    case("pad", "pad_of_none", lambda x: F.pad(x[:, :0], (x.shape[0], 0)).sum(0), floats(None, 3)),
    case("batch_norm_training", "instance_norm_batch", lambda x: NORM(x).sum(0), floats(None, 3, 4, 2)),
    case(
        "batch_norm_training",
        "instance_norm_image",
        lambda x: NORM(x).sum(0),
        lengths("s", "3", "s+1", "2"),
        sizes=(5, 9),
    ),
    case("view", "shifted_rows", lambda x: _shifted_rows(x) * 2, lengths("3", "s", "s+2"), sizes=(5, 7, 9, 12)),
]
UNKNOWN = [
    case(None, "transform_too_long", lambda x: torch.fft.fft(x).abs(), floats(None), sizes=(2100, 2200)),
    case(
        None,
        "bool_bags",
        lambda i, w: F.embedding_bag(i, w),
        ints(None, 3, low=0, high=2),
        floats(None, 6),
        sizes=(5, 9),
    ),
]
CASES: list[Case] = [*FOURIER, *GROUPS, *PLACES, *MERGED, *PIECES, *UNKNOWN]
