"""Gradients where functions have kinks: operands from a lattice, so that values are zero, equal, or just on an edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

LATTICE = torch.tensor([-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.0, 2.0, 3.0, 6.0])
Functions = Mapping[str, Callable[..., Tensor]]
CLASSES = torch.tensor([0, 3, 2, 1])
GROUPS = torch.arange(12).remainder(3).expand(4, 12)


def _by_name(owner: Any, names: str) -> dict[str, Callable[..., Tensor]]:
    return {name: getattr(owner, name) for name in names.split()}


ACTIVATIONS: Functions = {
    **_by_name(F, "relu relu6 hardtanh hardswish hardsigmoid leaky_relu elu selu celu softplus softsign softshrink"),
    **_by_name(F, "hardshrink tanhshrink gelu silu mish logsigmoid glu"),
    **_by_name(torch, "abs sign sqrt rsqrt log log1p reciprocal trunc frac round sinc acos atanh nan_to_num"),
    **{f"power {p}": lambda x, p=p: x**p for p in (0.0, 0.5, 1.0, 2.0, 3.0, -1.0)},
    "threshold": lambda x: F.threshold(x, 1.0, 5.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0),
}
PAIRS: Functions = {
    **_by_name(torch, "maximum minimum fmax fmin pow atan2 hypot fmod remainder xlogy div logaddexp dist cdist"),
    **_by_name(F, "l1_loss smooth_l1_loss huber_loss pairwise_distance cosine_similarity"),
    "where": lambda x, y: torch.where(x > y, x, y),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, torch.where(y > 0, 1.0, -1.0)),
    "ranking": lambda x, y: F.margin_ranking_loss(x, y, torch.ones(4, 12)),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, -y),
    "largest of groups": lambda x, y: x.scatter_reduce(1, GROUPS, y, "amax"),
    "product of groups": lambda x, y: x.scatter_reduce(1, GROUPS, y, "prod"),
    "written over": lambda x, y: x.index_put((torch.tensor([1, 1, 2]),), y[:3], accumulate=True),
}
REDUCTIONS: Functions = {
    **_by_name(torch, "prod amax amin max min median std norm"),
    **{f"{name} of rows": lambda x, f=f: f(x, 1) for name, f in _by_name(torch, "prod amax amin std cumprod").items()},
    **{f"{f.__name__} and where": lambda x, f=f: f(x, 1)[0] for f in (torch.max, torch.min, torch.cummax)},
    **{f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3, torch.inf)},
    **{f"norm {p} of 0": lambda x, p=p: torch.linalg.vector_norm(0 * x, p, 1) for p in (1, 2, 3, torch.inf)},
    "normalize 0": lambda x: F.normalize(0 * x),
    "layer norm of 0": lambda x: F.layer_norm(0 * x, (12,)),
    "batch norm of 0": lambda x: F.batch_norm(0 * x, None, None, training=True),
    "multi margin": lambda x: F.multi_margin_loss(x, CLASSES),
    "distances": F.pdist,
}
IMAGES: Functions = {
    "max_pool": lambda x: F.max_pool2d(x.view(1, 3, 4, 4), 3, 2, 1),
    "adaptive max_pool": lambda x: F.adaptive_max_pool2d(x.view(1, 3, 4, 4), 3),
    "lp_pool": lambda x: F.lp_pool2d(x.view(1, 3, 4, 4), 2, 2),
    "depthwise of 0": lambda x: F.conv2d(0 * x.view(1, 3, 4, 4), x[:3, :4].reshape(3, 1, 2, 2), groups=3),
    "depthwise by 0": lambda x: F.conv2d(x.view(1, 3, 4, 4), 0 * x[:3, :4].reshape(3, 1, 2, 2), groups=3),
    "reflected": lambda x: F.pad(x.view(1, 3, 4, 4), (2, 2, 1, 1), "reflect"),
    "sampled": lambda x: F.grid_sample(x.view(1, 3, 4, 4), x.view(1, 6, 4, 2) / 3, align_corners=True),
    "sampled at borders": lambda x: F.grid_sample(
        x.view(1, 3, 4, 4), x.view(1, 6, 4, 2) / 3, padding_mode="border", align_corners=False
    ),
}


FAMILIES = {"activations": ACTIVATIONS, "pairs": PAIRS, "reductions": REDUCTIONS, "images": IMAGES}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str, recorder: Recorder) -> None:
    """All functions are one graph, each of operands of its own."""
    functions = FAMILIES[family]
    count = 2 if functions is PAIRS else 1
    operands = {name: [_lattice() for _ in range(count)] for name in functions}

    def run(operands: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {name: function(*operands[name]) for name, function in functions.items()}

    before = recorder.snapshot()
    wanted, mine = (_results(f, operands) for f in (run, torch.compile(run, backend="dynaxla")))
    assert recorder.snapshot().eager_ops == before.eager_ops
    for name in functions:
        for a, b in zip(mine[name], wanted[name], strict=True):
            try:
                assert_close(a, b)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def _lattice() -> Tensor:
    return LATTICE[torch.randint(0, len(LATTICE), (4, 12))]


def _results(run: Callable[..., dict[str, Tensor]], operands: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Of each function the result and the gradients of its operands, for a fixed random cotangent."""
    given = {name: [x.clone().requires_grad_() for x in xs] for name, xs in operands.items()}
    out = run(given)
    torch.manual_seed(1)
    sum((x * torch.randn(x.shape)).sum() for x in out.values()).backward()
    return {name: [x.detach(), *(y.grad for y in given[name] if y.grad is not None)] for name, x in out.items()}
