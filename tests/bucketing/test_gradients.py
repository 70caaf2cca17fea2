"""Forward and backward of single ops through autograd, at sizes that share a bucket, with junk in the padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynaxla
from dynaxla.bucket_policy import DEFAULT
from tests.bucketing.plain_cases import floats, lengths
from tests.bucketing.poison import Make, poison
from tests.tolerances import assert_close

SIZES = (12, 9, 11)


def _definite(x: Tensor) -> Tensor:
    return x @ x.mT + 3 * torch.eye(x.shape[0])


def _every_other(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0])
    return x[places, :, places]


def _spectrum(x: Tensor) -> Tensor:
    return torch.stft(x.sin(), 8, 4, window=torch.hann_window(8), center=True, return_complex=True).abs()


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Make, ...]]] = {
    "chunk": (lambda x: torch.cat([part.sin() * i for i, part in enumerate(x.chunk(2, 1))], 1), (floats(3, None),)),
    "pad_to": (lambda x: F.pad(x.sin(), (0, 40 - x.shape[1])) @ torch.ones(40, 2), (floats(3, None),)),
    "max_pool": (lambda x: F.max_pool2d(x.sin(), 3, 2, 1, ceil_mode=True), (lengths("2", "3", "s", "s+1"),)),
    "avg_pool": (lambda x: F.avg_pool2d(x.sin(), 3, 2, 1, True, False), (lengths("2", "3", "s", "s+1"),)),
    "sample": (
        lambda x, g: F.grid_sample(x.sin(), g.tanh(), padding_mode="border", align_corners=False),
        (lengths("2", "3", "s", "s+1"), floats(2, None, 3, 2)),
    ),
    "bilinear": (F.bilinear, (floats(None, 4), floats(None, 3), floats(6, 4, 3))),
    "distances": (torch.cdist, (floats(None, 3), lengths("s+2", "3"))),
    "cholesky": (lambda x: torch.linalg.cholesky_ex(_definite(x))[0], (floats(None, 4),)),
    "cholesky_solve": (lambda x, b: torch.cholesky_solve(b, _definite(x).tril()), (floats(None, 4), floats(None, 2))),
    "diag_embed": (lambda x: torch.diag_embed(x.sin(), 1).cumsum(1), (floats(2, None),)),
    "index": (_every_other, (lengths("s", "4", "s"),)),
    "topk": (lambda x: torch.topk(x, x.shape[1] // 2, 1)[0], (floats(3, None),)),
    "matrix_exp": (lambda x: torch.matrix_exp(x / 4), (floats(None, 3, 3),)),
    "log_sigmoid": (F.logsigmoid, (floats(None, 3),)),
    "reflect": (lambda x: F.pad(x.sin(), (3, 2), mode="reflect") ** 2, (floats(2, 3, None),)),
    "reflect_by_size": (
        lambda x: F.pad(x.sin(), (x.shape[2] // 2, 1, 0, 2), mode="reflect") ** 2,
        (lengths("2", "s", "s+1"),),
    ),
    "replicate": (lambda x: F.pad(x.sin(), (3, 1, 2, 0), mode="replicate") ** 2, (lengths("2", "3", "s", "s+1"),)),
    "stft": (_spectrum, (lengths("2", "s*8"),)),
    **{
        f"resize_{mode}": (
            lambda x, mode=mode, corners=corners: (
                F.interpolate(x.sin(), (x.shape[2] + 3, x.shape[3] // 2), mode=mode, align_corners=corners) ** 2
            ),
            (lengths("2", "3", "s", "s+1"),),
        )
        for mode, corners in (("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bicubic", True))
    },
    **{
        f"antialias_{mode}": (
            lambda x, mode=mode: F.interpolate(x.sin(), (6, 3), mode=mode, antialias=True) ** 2,
            (lengths("2", "3", "s", "s+1"),),
        )
        for mode in ("bilinear", "bicubic")
    },
    "fold": (lambda x: F.fold(F.unfold(x.sin(), 2), x.shape[2:], 2) ** 2, (lengths("2", "3", "s", "s+1"),)),
    "outer_product": (lambda x, u, v: torch.addr(x, u, v, beta=2), (lengths("s", "s+1"), floats(None), lengths("s+1"))),
    "sum_of_products": (torch.addbmm, (floats(2, None), floats(3, 2, 4), floats(3, 4, None))),
    "distance": (lambda x, y: torch.dist(x, y, 3), (floats(None, 3), floats(None, 3))),
    "take": (lambda x: torch.take(x.sin(), x.argsort(1) - 3), (floats(3, None),)),
    "put": (lambda x, y: torch.put(x.sin(), y.argsort() * 2, y * 2), (floats(3, None), floats(None))),
    "mode": (lambda x: x.mode(0)[0], (lambda size: torch.arange(3.0 * size).view(size, 3).remainder(5),)),
    "global_max": (lambda x: F.adaptive_max_pool2d(x.sin(), 1) ** 2, (lengths("2", "3", "s", "s+1"),)),
    "global_max_of_volumes": (lambda x: F.adaptive_max_pool3d(x.sin(), 1) ** 2, (lengths("2", "3", "s", "s+1", "2"),)),
    "global_max_of_lines": (lambda x: F.adaptive_max_pool1d(x.sin(), 1) ** 2, (floats(2, 3, None),)),
    "number_median": (lambda x: torch.where(x > 1, torch.nan, x).nanmedian(1)[0], (floats(3, None),)),
    "qr": (lambda x: torch.linalg.qr(x)[1], (floats(None, 4),)),
    "resize_line": (lambda x: F.interpolate(x.sin(), scale_factor=2.0, mode="linear") ** 2, (floats(2, 3, None),)),
    "adaptive_mean": (lambda x: F.adaptive_avg_pool2d(x.sin(), (3, 2)) ** 2, (lengths("2", "3", "s", "s+1"),)),
    "adaptive_mean_line": (lambda x: F.adaptive_avg_pool1d(x.sin(), 4) ** 2, (floats(None, 3, None),)),
    "tril": (lambda x: torch.tril(x, x.shape[1] - x.shape[0]), (lengths("s", "2*s"),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    function, makes = FUNCTIONS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=True, options={"buckets": DEFAULT})
    before = dynaxla.read_metrics()
    for size in SIZES:
        torch.manual_seed(size)
        made = [make(size) for make in makes]
        results = []
        for run in (function, compiled):
            given = [x.clone().requires_grad_() for x in made]
            output = run(*given)
            output.exp().sum().backward()
            results.append((output.detach(), *(x.grad for x in given)))
        for eager, mine in zip(*results, strict=True):
            assert eager is not None
            assert mine is not None
            assert_close(mine, eager)
    after = dynaxla.read_metrics()
    assert after.exact_shapes == before.exact_shapes
    assert after.eager_ops == before.eager_ops, after.fallbacks[len(before.fallbacks) :]
    assert after.compiles - before.compiles == 2  # forward and backward
