"""F.interpolate, compiled: the very elements and weights of eager, forward and backward, at fixed and dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.tolerances import assert_close

SETTINGS: list[dict[str, Any]] = [
    {"scale_factor": 2.3, "mode": "nearest"},
    {"scale_factor": (0.6, 1.7), "mode": "nearest-exact"},
    {"size": (5, 9), "mode": "nearest"},
    {"scale_factor": 2.3, "mode": "bilinear"},
    {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True},
    {"scale_factor": 2.3, "mode": "bicubic", "recompute_scale_factor": True},
    {"size": (4, 11), "mode": "bicubic", "align_corners": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=[str(s) for s in SETTINGS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image(settings: dict[str, Any], dtype: torch.dtype, recorder: Recorder) -> None:
    image = torch.randn(2, 3, 7, 6).to(dtype)
    compiled = torch.compile(F.interpolate, backend="dynaxla")
    with recorder.expect(compiles=1):
        result = compiled(image, **settings)
    assert_close(result, F.interpolate(image, **settings))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing(mode: str) -> None:
    image = torch.randn(2, 3, 9, 12)
    compiled = torch.compile(F.interpolate, backend="dynaxla")
    expected = F.interpolate(image, scale_factor=0.4, mode=mode, antialias=True)
    assert_close(compiled(image, scale_factor=0.4, mode=mode, antialias=True), expected)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_image_of_bytes(mode: str) -> None:
    image = torch.randint(0, 255, (2, 3, 7, 6), dtype=torch.uint8)
    result = torch.compile(F.interpolate, backend="dynaxla")(image, size=(10, 7), mode=mode)
    assert torch.equal(result, F.interpolate(image, size=(10, 7), mode=mode))


def test_gradients() -> None:
    images = [torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        images[1].copy_(images[0])
    for image, resize in zip(images, (F.interpolate, torch.compile(F.interpolate, backend="dynaxla")), strict=True):
        (resize(image, scale_factor=2.3, mode="bilinear") ** 2).sum().backward()
    assert images[0].grad is not None
    assert images[1].grad is not None
    assert_close(images[1].grad, images[0].grad)


def test_dynamic_sizes() -> None:
    compiled = torch.compile(F.interpolate, backend="dynaxla", dynamic=True)
    for size in (5, 6, 9):
        image = torch.randn(1, 2, size, size + 1)
        assert_close(compiled(image, scale_factor=2.3, mode="nearest"), F.interpolate(image, scale_factor=2.3))


def test_other_backends_keep_torchs_kernels() -> None:
    before = dict(torch.ops.aten.upsample_nearest2d.vec.py_kernels)
    torch.compile(F.interpolate, backend="dynaxla")(torch.randn(1, 1, 3, 3), scale_factor=2.0)
    assert dict(torch.ops.aten.upsample_nearest2d.vec.py_kernels) == before


SHAPES = {
    "nearest": [(2, 3, 5), (3, 3, 5), (3, 3, 8)],
    "linear": [(2, 3, 5), (3, 3, 5), (3, 3, 8)],
    "bilinear": [(2, 3, 5, 6), (3, 3, 5, 6), (3, 3, 7, 9)],
    "bicubic": [(2, 3, 5, 6), (3, 3, 5, 6), (3, 3, 7, 9)],
    "trilinear": [(1, 2, 3, 4, 5), (2, 2, 3, 4, 5), (2, 2, 4, 5, 6)],
}


@pytest.mark.parametrize(
    ("mode", "antialias"),
    quick(
        [*((mode, False) for mode in SHAPES), ("bilinear", True), ("bicubic", True)],
        ("nearest", False),
        ("bilinear", False),
        ("bicubic", True),
    ),
)
def test_training_at_other_sizes(mode: str, antialias: bool) -> None:
    def model(image: torch.Tensor) -> torch.Tensor:
        return F.interpolate(image * 1, scale_factor=2.0, mode=mode, antialias=antialias)

    compiled = torch.compile(model, backend="dynaxla")
    for shape in SHAPES[mode]:
        images = [torch.randn(shape)]
        images.append(images[0].clone())
        for image, resize in zip(images, (model, compiled), strict=True):
            (resize(image.requires_grad_()) ** 2).sum().backward()
        assert_close(images[1].grad, images[0].grad)


@pytest.mark.parametrize("mode", quick(["bilinear", "bicubic", "trilinear"], "bilinear"))
def test_gradients_lie_as_in_eager(mode: str) -> None:
    shape, layout = SHAPES[mode][0], torch.channels_last_3d if mode == "trilinear" else torch.channels_last
    compiled = torch.compile(F.interpolate, backend="dynaxla", dynamic=True)
    found = []
    for resize in (F.interpolate, compiled):
        image = torch.ones(shape).to(memory_format=layout).requires_grad_()
        resize(image, scale_factor=2.0, mode=mode).sum().backward()
        assert image.grad is not None
        found.append(image.grad.stride())
    assert found[1] == found[0]


BY_COMPUTED_FACTORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a size": lambda x: torch.ops.aten.upsample_nearest2d.vec(x, None, [(2 * x.size(2) + 1) / x.size(2), 1.5]),
    "of two sizes": lambda x: torch.ops.aten.upsample_nearest2d.vec(x, None, [x.size(2) / x.size(3) + 1, 2.3]),
}


@pytest.mark.parametrize("name", BY_COMPUTED_FACTORS)
def test_factors_are_computed_from_sizes(name: str) -> None:
    function = BY_COMPUTED_FACTORS[name]
    compiled = torch.compile(function, backend="dynaxla")
    for shape in ((2, 3, 4, 5), (2, 3, 6, 7), (1, 2, 5, 5), (1, 1, 20, 36)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), function(x), atol=0, rtol=0)
