"""Indices of max pooling are the same however many elements of a window are searched at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dynaxla.observe.recorder import Recorder
from dynaxla.ops import pooling
from tests.tolerances import assert_close

WINDOWS = [
    ([3, 3], [2, 2], [1, 1], [1, 1]),
    ([5, 2], [1, 3], [2, 0], [1, 2]),
    ([4, 7], [2, 1], [1, 3], [2, 1]),
    ([2, 3, 4], [1, 2, 2], [1, 0, 2], [1, 1, 1]),
    ([3, 1, 3], [2, 1, 1], [0, 0, 1], [2, 1, 2]),
    ([1, 40], [1, 3], [0, 5], [1, 1]),
    ([35, 2], [4, 1], [3, 1], [2, 1]),
    ([33, 34], [2, 1], [0, 1], [1, 2]),
]


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), WINDOWS)
def test_searches_agree_with_eager(
    kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> None:
    sizes = [max(9, gap * (k - 1) + 4) for k, gap in zip(kernel, dilation, strict=True)]
    x = torch.randint(-2, 3, (2, 3, *sizes)).double()
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


@pytest.mark.parametrize("pool", [F.max_pool1d, F.avg_pool1d])
def test_a_window_over_a_whole_sequence_is_a_loop(pool: Callable[..., torch.Tensor], recorder: Recorder) -> None:
    """Written out, 5,000 elements would take the compiler hours."""

    def head(x: torch.Tensor) -> torch.Tensor:
        return pool(x.sin(), x.shape[-1]).squeeze(-1)

    compiled = torch.compile(head, backend="dynaxla", dynamic=False)
    x = torch.randn(2, 3, 5000)
    ours, eager = (x.clone().requires_grad_() for _ in range(2))
    with recorder.expect(eager_ops=0):
        result = compiled(ours)
        result.sum().backward()
    head(eager).sum().backward()
    assert_close(result, head(x))
    for_ours, for_eager = ours.grad, eager.grad
    assert for_ours is not None
    assert for_eager is not None
    assert_close(for_ours, for_eager)
