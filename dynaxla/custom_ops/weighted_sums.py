"""Sums of some elements of a row, times weights: a product with a matrix in which zero hides what it multiplies."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("dynaxla::weighted_sums", mutates_args=())
def weighted_sums(x: Tensor, weights: Tensor, is_read: Tensor) -> Tensor:
    """Returns `[..., m]`, the sums of rows `x [..., n]` times `weights [m, n]`, over the elements that `is_read`, bool [m, n].

    What is not read may be infinite or NaN. The weights and the result have the dtype of x, a float; or x is uint8 and they are
    int32.
    """
    shares = x.unsqueeze(-2).to(weights.dtype) * weights
    return shares.masked_fill(~is_read, 0).sum(-1, dtype=weights.dtype)


@weighted_sums.register_fake
def _(x: Tensor, weights: Tensor, is_read: Tensor) -> Tensor:
    return x.new_empty([*x.shape[:-1], weights.shape[0]], dtype=weights.dtype)


WEIGHTED_SUMS = torch.ops.dynaxla.weighted_sums.default
