"""Cases of sizes as numbers, of sizes that do not grow with their symbols, and of positions in other places."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from tests.bucketing.data_cases import distinct
from tests.bucketing.plain_cases import floats, ints, lengths
from tests.bucketing.poison import Case, Make, case

aten = torch.ops.aten
UP = (5, 7, 12, 9, 17)
TWICE = (7, 8, 11, 12)  # sizes that share a bucket where 2 * size and 3 * size do too


def _int8(*dims: str) -> Make:
    made = lengths(*dims)
    return lambda s: (made(s) * 30).to(torch.int8)


FALLING = [
    case("split", "chunks", lambda x: [part.sum(1) for part in x.chunk(3, 1)], floats(2, None), sizes=UP),
    case("arange", "rest", lambda x: torch.arange(40 - x.shape[0]) + x.sum(), floats(None), sizes=UP),
    case("arange", "remainder", lambda x: torch.arange(x.shape[0] % 8 + 2) + x.sum(), floats(None), sizes=UP),
    case("arange", "difference", lambda x, y: torch.arange(y.shape[0] - x.shape[0]) + x.sum(), floats(None),
         lengths("2*s+3"), sizes=TWICE),
    case("pad", "pad_to", lambda x: F.pad(x, (0, 40 - x.shape[1])).flip(1), floats(3, None), sizes=UP),
    case("pad", "pad_to_multiple", lambda x: F.pad(x, (0, -x.shape[1] % 8)).flip(1), floats(3, None), sizes=UP),
    case("slice", "rest_of_fixed", lambda x, w: (w[x.shape[0] :] * 2, w[: 40 - x.shape[0]].softmax(0)), floats(None),
         floats(40), sizes=UP),
    case("view", "view_of_rest", lambda x: x[:, x.shape[1] // 3 : x.shape[1] - 2].reshape(-1).flip(0), floats(3, None),
         sizes=(7, 9, 12, 16, 17)),
    case("creation", "product_of_rest", lambda x: torch.ones(40 - x.shape[0], x.shape[0]) @ x, floats(None, 3), sizes=UP),
    case("concatenate", "filled_up", lambda x: torch.cat([x, x.new_zeros(40 - x.shape[0], 3)]).cumsum(0),
         floats(None, 3), sizes=UP),
]  # fmt: skip
QUARTERS = (8, 24, 20, 28, 16)
GUARDED = [
    case(
        "view",
        "quarters",
        lambda x: x.view(x.shape[0], x.shape[1] // 4, 4, 3).cumsum(2),
        floats(2, None, 3),
        sizes=QUARTERS,
    ),
    case(
        "view", "by_quarters", lambda x: x.view(2, x.shape[1] // 4, -1, 3).cumsum(1), floats(2, None, 3), sizes=QUARTERS
    ),
]
NUMBERS = [
    case("topk", "topk_half", lambda x: torch.topk(x, x.shape[1] // 2, 1), distinct(3, None), sizes=UP),
    case("topk", "topk_third_smallest", lambda x: torch.topk(x, x.shape[0] // 3 + 1, 0, largest=False)[0].sum(0),
         distinct(None, 3), sizes=UP),
    case("kth_value", "kth_half", lambda x: torch.kthvalue(x, x.shape[1] // 2, 1), distinct(3, None), sizes=UP),
    case("kth_value", "kth_last", lambda x: torch.kthvalue(x, x.shape[0], 0, keepdim=True), distinct(None, 3), sizes=UP),
    case("arange", "arange_by_size", lambda x: torch.arange(0, x.shape[0] * 5, x.shape[0]) + x.sum(), floats(None),
         sizes=UP),
    case("arange", "arange_to_100", lambda x: torch.arange(0, 100, x.shape[0]).flip(0), floats(None), sizes=UP),
    case("arange", "arange_down", lambda x: torch.arange(x.shape[0] - 1, -1, -1) * x, floats(None)),
    case("arange", "arange_fractions", lambda x: torch.arange(0.0, x.shape[0], 0.5).cumsum(0), floats(None), sizes=UP),
    case("linspace", "linspace_to_size",
         lambda x: (torch.linspace(0, x.shape[0], 5), torch.linspace(x.shape[0], -1.5, 4) + x.sum()), floats(None)),
    case("elementwise", "alpha", lambda x: (torch.add(x, x, alpha=x.shape[0]), torch.sub(x, x.shape[0], alpha=2)),
         floats(None, 3)),
    case("elementwise", "alpha_half", lambda x: torch.add(x, x * 3, alpha=x.shape[0]), floats(None, 3, dtype=torch.bfloat16)),
    case("elementwise", "alpha_reverse", lambda x: (torch.rsub(x, 3, alpha=2) * x.shape[0], torch.rsub(x, x, alpha=x.shape[0])),
         ints(None, 3)),
    case("elementwise", "clamps",
         lambda x: (x.clamp(max=x.shape[0] // 2), x.clamp(0, x.shape[0]), x.clamp_min(x.shape[0] / 4)),
         ints(None, 3, high=30)),
    case("elementwise", "powers", lambda x: (x ** x.shape[0], 1.5 ** x.shape[0] * x, x.shape[0] ** x), floats(None, 3)),
    case("elementwise", "bits", lambda x: (x & x.shape[0], x | x.shape[0], x ^ x.shape[0], x << x.shape[0] % 4),
         ints(None, 3, low=0)),
    case("elementwise", "choices", lambda x: (torch.where(x > 0, x.shape[0], 2), torch.where(x > 0, x, x.shape[0] / 2)),
         floats(None, 3)),
    case("pad", "pad_with_size", lambda x: aten.constant_pad_nd(x, [1, x.shape[1] // 2], x.shape[1]).sum(1),
         floats(3, None), sizes=UP),
]  # fmt: skip
POWERS = (5, 7, 8, 9, 16, 17, 12)  # a logarithm of 8 and of 16 is to be exact
BY_CALLER = [
    case("roll", "rolled_by_log", lambda x: torch.roll(x, math.ceil(math.log2(x.shape[1])), 1), floats(3, None),
         sizes=POWERS),
    case("elementwise", "times_log", lambda x: x * math.log2(x.shape[1]) + math.atan(x.shape[1]), floats(3, None),
         sizes=POWERS),
    case("creation", "as_many_as_log",
         lambda x: (x.new_ones(math.ceil(math.log2(x.shape[1]))).cumsum(0), x[:, : math.ceil(math.log2(x.shape[1]))].sum(1)),
         floats(3, None), sizes=POWERS),
    case("roll", "rolled_by_bits", lambda x: torch.roll(x, x.shape[1] & 3, 1) + (x.shape[1] ^ 5) + (x.shape[1] | 8),
         floats(3, None), sizes=UP),
    case("roll", "rolled_by_two_sizes", lambda x, y: torch.roll(x, x.shape[1] & y.shape[0], 1), floats(3, None),
         lengths("2*s+3"), sizes=TWICE),
    case("elementwise", "fractional_powers", lambda x: x * x.shape[1] ** 0.3 + x.shape[1] ** -0.5, floats(3, None), sizes=UP),
    case("scalar_tensor", "comparison", lambda x: torch.where(torch.tensor(x.shape[1] > 8), x, -x), floats(3, None), sizes=UP),
]  # fmt: skip
WHOLE = [
    case("product", "int8", lambda x, y: torch._int_mm(x, y), _int8("s", "s+1"), _int8("s+1", "8")),
    case("product", "int8_rows", lambda x, y: torch._int_mm(x, y).sum(0), _int8("s", "8"), _int8("8", "16")),
]
PLACES = [
    case("index", "dims_between", lambda x, i, j: (x[i, :, j] + 0, x[i, :, -1 - j].sum(1)), lengths("s", "4", "s"),
         lambda s: torch.randint(0, s, (s,)), lambda s: torch.randint(0, s, (s,))),
    case("index", "dims_between_places", lambda x, i, j: x[i.reshape(3, -1), :, j], lengths("3*s", "2", "s"),
         lambda s: torch.randint(0, 3 * s, (3 * s,)), lambda s: torch.randint(0, s, (3, s)), sizes=TWICE),
    case("index_put", "dims_between_put", lambda x, i, v: aten.index_put(x, [i, None, i], v), lengths("s", "4", "s"),
         lambda s: torch.randperm(s), lengths("s", "4")),
    case("index_put", "dims_between_added", lambda x, i, v: aten.index_put(x, [i, None, i], v, True).sum(0),
         lengths("s", "4", "s"), lambda s: torch.randint(-s, s, (s,)), lengths("4")),
    case("index_put", "put_in_places", lambda x, j, v: aten.index_put(x, [j.reshape(-1)], v, True), floats(None),
         lambda s: torch.randint(0, s, (3, s)), lengths("3*s"), sizes=TWICE),
    case("index_put", "put_into_places", lambda x, j, v: aten.index_put(x.reshape(-1, 4), [j], v), floats(None, 3, 4),
         lambda s: torch.randperm(3 * s)[:s], lengths("s", "4")),
    case("index_put", "put_where_in_places", lambda x, m: aten.index_put(x.reshape(-1), [m], torch.zeros(())),
         floats(None, 3), lambda s: torch.randint(0, 2, (3 * s,)).bool(), sizes=TWICE),
    case("gather", "gather_in_places", lambda x, j: x.reshape(-1, 2).gather(1, j), floats(None, 3, 2),
         lambda s: torch.randint(0, 2, (3 * s, 1)), sizes=TWICE),
    case("gather", "gather_in_a_corner", lambda x, j: x.gather(1, j), lengths("s+3", "5"), ints(None, 2, low=0, high=5)),
    case("scatter", "scatter_in_places", lambda x, j, v: x.reshape(-1, 5).scatter_add(1, j, v), floats(None, 3, 5),
         lambda s: torch.randint(0, 5, (3 * s, 2)), lengths("3*s", "2"), sizes=TWICE),
    case("scatter", "scatter_in_a_corner", lambda x, j, v: x.scatter_add(1, j, v), lengths("s+3", "5"),
         ints(None, 2, low=0, high=5), lengths("s+1", "4")),
    case("scatter", "index_add_in_places", lambda x, j, v: x.index_add(0, j, v.reshape(x.shape[0], -1)),
         lengths("s", "3*s"), lambda s: torch.randint(0, s, (s,)), lengths("s", "3", "s"), sizes=TWICE),
    case("select_scatter", "select_scatter_in_places",
         lambda x, y: torch.select_scatter(x.reshape(x.shape[0] * 3, -1), y, 1, 1), floats(None, 3, 4), lengths("3*s"),
         sizes=TWICE),
]  # fmt: skip
CASES: list[Case] = [*FALLING, *GUARDED, *NUMBERS, *BY_CALLER, *WHOLE, *PLACES]
