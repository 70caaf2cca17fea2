"""Indices of max pooling are the same however many elements of a window are searched at once."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dynaxla.ops import pooling

WINDOWS = [
    ([3, 3], [2, 2], [1, 1], [1, 1]),
    ([5, 2], [1, 3], [2, 0], [1, 2]),
    ([4, 7], [2, 1], [1, 3], [2, 1]),
    ([2, 3, 4], [1, 2, 2], [1, 0, 2], [1, 1, 1]),
    ([3, 1, 3], [2, 1, 1], [0, 0, 1], [2, 1, 2]),
]


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), WINDOWS)
def test_searches_agree_with_eager(
    kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> None:
    x = torch.randint(-2, 3, (2, 3, *(9 for _ in kernel))).double()
    x[torch.rand(x.shape) < 0.1] = math.nan
    x[torch.rand(x.shape) < 0.3] = -math.inf
    pool = F.max_pool2d if len(kernel) == 2 else F.max_pool3d
    _, wanted = pool(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    windows = pooling._Windows(x.shape[2:], kernel, stride, padding, dilation, ceil_mode)
    with jax.enable_x64(True):
        for most in (1, 6, 12, 64):
            found = pooling._places(np.asarray(x), windows, -math.inf, most)
            assert np.array_equal(found, wanted)


def test_axes_are_grouped_while_few_elements_are_searched() -> None:
    windows = pooling._Windows([9, 9, 9], [3, 2, 5], [1] * 3, [0] * 3, [1] * 3, False)
    groups = {most: [list(axes) for axes in windows.group_axes(most)] for most in (1, 9, 10, 29, 30)}
    assert groups[1] == [[2], [1], [0]]
    assert groups[9] == [[2], [0, 1]]
    assert groups[10] == groups[29] == [[1, 2], [0]]
    assert groups[30] == [[0, 1, 2]]
