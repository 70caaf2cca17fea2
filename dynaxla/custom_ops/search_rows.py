"""Binary search in the true elements of padded rows, at which torch's steps depend on how many there are."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dynaxla::search_rows", mutates_args=())
def search_rows(rows: Tensor, values: Tensor, count: Tensor, right: bool, out_int32: bool) -> Tensor:
    """`torch.searchsorted` in the first `count` elements, int64 [], of each row: rows [n] or [..., n], values [...], result
    like values.

    In a row that is not sorted, or holds NaN, the steps of the search say what is found, and they follow from the count.
    """
    return torch.searchsorted(
        rows[..., : int(count)].contiguous(), values.contiguous(), right=right, out_int32=out_int32
    )


@search_rows.register_fake
def _(rows: Tensor, values: Tensor, count: Tensor, right: bool, out_int32: bool) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.int32 if out_int32 else torch.int64)


SEARCH_ROWS = torch.ops.dynaxla.search_rows.default
