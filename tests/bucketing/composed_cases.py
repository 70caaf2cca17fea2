"""Cases of ops that have no pad rule and are made of ops that have one, where a size varies."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.bucketing.plain_cases import floats, ints, lengths
from tests.bucketing.poison import Case, case

SHORT = (5, 9, 12)


def _most_frequent(x: torch.Tensor) -> list[torch.Tensor]:
    """Each most frequent value, and that found by its index: which of equal elements eager names differs for long rows."""
    rounded = x.round()
    down, across = rounded.mode(0), rounded.mode(1, True)
    whole = rounded.t().long().mode(-1)
    return [down[0], rounded.gather(0, down[1][None]), across[0], rounded.gather(1, across[1]), whole[0]]


READS = [
    case("index", "take", lambda x, i: (torch.take(x, i % 3), torch.take(x, -1 - i % 3).sum(0)), floats(None, 3),
         ints(4, None, low=0)),
    case("index", "take_from_the_end", lambda x: torch.take(x.t(), torch.tensor([[0, -1], [2, -2]])), floats(None, 3),
         sizes=SHORT),
    case("index_put", "put", lambda x, i, y: torch.put(x, i - 6, y).cumsum(0), floats(None, 3),
         lambda s: torch.randperm(s), floats(None), sizes=(7, 9, 12)),
    case("index_put", "put_sums", lambda x, y: x.put(torch.zeros(2, y.shape[1]).long(), y, accumulate=True), floats(None, 3),
         floats(2, None)),
    case("gather", "mode", _most_frequent, floats(None, 3), sizes=(5, 7, 9, 12, 31)),
    case("search", "search_a_number",
         lambda x: (torch.searchsorted(x.sort()[0], 0.25, right=True), torch.bucketize(0.25, x.sort()[0])), floats(None),
         sizes=SHORT),
    case("search", "search_a_whole_number",
         lambda x: torch.searchsorted(x.sort()[0], 2, side="right", out_int32=True), ints(None), sizes=SHORT),
]  # fmt: skip
PRODUCTS = [
    case("elementwise", "outer_product", lambda x, u, v: torch.addr(x, u, v, beta=0.5, alpha=2).sum(0), lengths("s", "s+1"),
         floats(None), lengths("s+1"), sizes=SHORT),
    case("elementwise", "outer_product_of_ints", lambda u, v: torch.addr(torch.ones(1, 1).long(), u, v, alpha=3), ints(None),
         ints(3), sizes=SHORT),
    case("elementwise", "outer_product_unread", lambda x, u: torch.addr(x * torch.nan, u, u, beta=0), floats(None, None),
         floats(None), sizes=SHORT),
    case("product", "sum_of_products", lambda x, a, b: torch.addbmm(x, a, b, beta=2, alpha=0.5), lengths("s+1", "2"),
         lengths("3", "s+1", "s"), floats(3, None, 2), sizes=SHORT),
    case("product", "sum_of_many_products", lambda a, b: torch.addbmm(torch.zeros(1, 1), a, b), floats(None, 3, 2),
         floats(None, 2, 3), sizes=SHORT),
    *[
        case("reduction", f"distance_{p}", lambda x, y, p=p: torch.dist(x, y, p), floats(None, 3), floats(None, 1), sizes=SHORT)
        for p in (0, 1, 2, 3.5, float("inf"), -float("inf"))
    ],
]  # fmt: skip
PIECES = [
    case("concatenate", "diagonal_blocks",
         lambda x, y: torch.block_diag(x, torch.ones(3), y.sum(), y, torch.ones(2, 2)).cumsum(0), floats(None, 3),
         lengths("s", "s+1"), sizes=SHORT),
    case("index_put", "fold", lambda x: F.fold(F.unfold(x, 2, padding=1), x.shape[2:], 2, padding=1),
         lengths("2", "3", "s", "s+1"), sizes=SHORT),
    case("index_put", "fold_batch", lambda x: F.fold(x, (5, 5), 2, stride=3).sum(0), floats(None, 12, 4), sizes=SHORT),
    case("reduction", "global_max",
         lambda x: F.adaptive_max_pool2d(torch.where(x > 1, torch.nan, x), 1, return_indices=True),
         lengths("2", "4", "s", "s+1"), sizes=SHORT),
    case("slice", "narrow_copy", lambda x: torch.narrow_copy(x, 0, 1, x.shape[0] - 2), floats(None, 3), sizes=SHORT),
]  # fmt: skip
NUMBERS = [
    case("elementwise", "between_transposed", lambda x: torch.lerp(x.t(), x.t() * 2, 1 / x.shape[0]), floats(None, 3),
         sizes=SHORT),
    case("elementwise", "slope_of_transposed", lambda x: F.leaky_relu(x.t(), 1 / x.shape[0]), floats(None, 3), sizes=SHORT),
    case("product", "scaled_products_of_transposed",
         lambda x: (torch.addmm(x[:3].t(), x.t(), x, beta=1 / x.shape[0]), torch.addmv(x[0], x.t(), x[:, 1], beta=x.shape[0])),
         floats(None, 3), sizes=SHORT),
    case("product", "scaled_batches_of_transposed",
         lambda x: torch.baddbmm(x[None].mT, x[None].mT, torch.ones(1, x.shape[0], x.shape[0]), beta=1 / x.shape[0]),
         floats(None, 4), sizes=SHORT),
]  # fmt: skip
CASES: list[Case] = [*READS, *PRODUCTS, *PIECES, *NUMBERS]
