"""Affine grids, and the gradients of their matrices, of sizes that vary and of dims of one place, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

SIZES = ((4, 9, 7, 5), (6, 5, 8, 6), (2, 4, 1, 3), (3, 1, 11, 4), (5, 1, 1, 1))


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior has changed")
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sizes_that_vary(dims: int, align_corners: bool, dtype: torch.dtype) -> None:
    def sample(theta: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        size = [theta.shape[0], 3, *image.shape[2:]]
        return F.affine_grid(theta, size, align_corners=align_corners) * image.mean(1).unsqueeze(-1)

    compiled = torch.compile(sample, backend="dynaxla", dynamic=True)
    for batch, *spatial in SIZES[: 5 if dtype is torch.float32 else 2]:
        image = torch.randn(batch, 3, *spatial[:dims], dtype=dtype)
        theta = torch.randn(batch, dims, dims + 1, dtype=dtype)
        mine, eager = (theta.clone().requires_grad_() for _ in range(2))
        result, expected = compiled(mine, image), sample(eager, image)
        assert_close(result, expected)
        assert result.stride() == expected.stride()
        weights = torch.randn_like(expected)
        (gradient,), (wanted,) = (
            torch.autograd.grad(result, mine, weights),
            torch.autograd.grad(expected, eager, weights),
        )
        assert_close(gradient, wanted)
        assert gradient.stride() == wanted.stride()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_dim_of_one_place_is_compiled(requires_grad: bool, recorder: Recorder) -> None:
    """torch's own decomposition and gradient make a constant there, and left the graph to eager."""
    theta = torch.randn(2, 2, 3, requires_grad=requires_grad)
    compiled = torch.compile(lambda t: F.affine_grid(t, [2, 3, 1, 4], align_corners=False), backend="dynaxla")
    with recorder.expect(compiles=1):
        grid = compiled(theta)
    assert_close(grid, F.affine_grid(theta, [2, 3, 1, 4], align_corners=False))
