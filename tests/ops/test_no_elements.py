"""Calls on tensors without elements: an empty batch, no places. Results and gradients as eager's, in the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tolerances import assert_close

IMAGES = (0, 4, 6, 6)


def _integers(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def _max_unpool(x: Tensor) -> Tensor:
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


CASES: Mapping[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "convolution": (F.conv2d, (IMAGES, (5, 4, 3, 3))),
    "of single places": (F.conv2d, (IMAGES, (5, 4, 1, 1))),
    "of groups": (lambda x, w: F.conv2d(x, w, groups=2), ((0, 4, 20, 20), (4, 2, 3, 3))),
    "of a group's few places": (lambda x, w: F.conv2d(x, w, groups=2), (IMAGES, (8, 2, 5, 5))),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=4), (IMAGES, (4, 1, 3, 3))),
    "of volumes": (F.conv3d, ((0, 4, 5, 5, 5), (2, 4, 3, 3, 3))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (IMAGES, (4, 2, 3, 3))),
    "no channels": (F.conv2d, ((2, 0, 6, 6), (5, 0, 3, 3), (5,))),
    "no channels, in groups": (lambda x, w: F.conv1d(x, w, stride=2, groups=3), ((2, 0, 9), (12, 0, 3))),
    "no channels of volumes": (lambda x, w: F.conv3d(x, w, groups=3), ((2, 0, 5, 5, 5), (12, 0, 3, 3, 3))),
    "max pool": (lambda x: F.max_pool2d(x, 2), (IMAGES,)),
    "adaptive max pool": (lambda x: F.adaptive_max_pool2d(x, 2), (IMAGES,)),
    "max unpool": (_max_unpool, (IMAGES,)),
    "mean pool": (lambda x: F.avg_pool2d(x, 2), (IMAGES,)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (IMAGES,)),
    "bicubic": (lambda x: F.interpolate(x, size=(3, 3), mode="bicubic"), (IMAGES,)),
    "areas": (lambda x: F.interpolate(x, size=(3, 3), mode="area"), (IMAGES,)),
    "columns": (lambda x: F.unfold(x, 2), (IMAGES,)),
    "of columns": (lambda x: F.fold(x, (5, 5), 2), ((0, 12, 16),)),
    "grid sample": (lambda x, grid: F.grid_sample(x, grid, align_corners=False), (IMAGES, (0, 2, 2, 2))),
    "grid sample at no places": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=True),
        ((2, 4, 3, 3), (2, 0, 2, 2)),
    ),
    "reflected": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (IMAGES,)),
    "of other bytes": (lambda x: x.view(torch.int16).sum(), ((0, 3),)),
    "of wider bytes": (lambda x: x.view(torch.float64), ((0, 4),)),
    "complex": (torch.view_as_complex, ((0, 3, 2),)),
    "no rows of a table": (lambda table: F.embedding(_integers(0), table), ((5, 3),)),
    "rows without columns": (lambda table: F.embedding(_integers(3), table), ((5, 0),)),
    "bags": (lambda table: F.embedding_bag(_integers(0), table, _integers(2)), ((5, 3),)),
    "largest": (lambda x: x.topk(2)[0], ((0, 5),)),
    "sorted": (lambda x: x.sort(1)[0], ((3, 0),)),
    "median": (lambda x: x.median(1)[0], ((0, 5),)),
    "masked scatter": (lambda x, source: x.masked_scatter(x > 0, source), ((0, 5), (3,))),
    "put": (lambda x, source: x.put(_integers(0), source), ((4, 5), (0,))),
    "batch norm": (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), (IMAGES,)),
    "group norm": (lambda x: F.group_norm(x, 2), (IMAGES,)),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), ((0, 2, 4, 8), (0, 2, 4, 8))),
    "attention of no queries": (lambda q, k: F.scaled_dot_product_attention(q, k, k), ((1, 2, 0, 8), (1, 2, 4, 8))),
    "cross entropy": (lambda x: F.cross_entropy(x, _integers(0), reduction="sum"), ((0, 5),)),
    "running sum": (lambda x: x.cumsum(0), ((0, 3),)),
    "running logsumexp": (lambda x: x.logcumsumexp(0), ((0, 3),)),
    "distances": (torch.cdist, ((0, 3), (4, 3))),
    "product of no terms": (torch.matmul, ((3, 0), (0, 2))),
    "determinants": (torch.linalg.det, ((0, 3, 3),)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_elements(name: str) -> None:
    function, sizes = CASES[name]
    torch._dynamo.reset()
    given = [torch.randn(size).requires_grad_() for size in sizes]
    compiled = torch.compile(function, backend="dynaxla", dynamic=False, options={"fallback": "error"})
    expected, actual = function(*given), compiled(*given)
    assert_close(actual, expected)
    if expected.requires_grad:
        seed = torch.randn_like(expected)
        gradients = [torch.autograd.grad(each, given, seed, allow_unused=True) for each in (actual, expected)]
        for mine, wanted in zip(*gradients, strict=True):
            assert (mine is None) == (wanted is None)
            if wanted is not None:
                assert_close(mine, wanted)
