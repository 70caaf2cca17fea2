"""Convolutions that the CPU computes otherwise than by one of XLA's: those of groups, of volumes, transposed ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import jax
import pytest
import torch
from jax import Array
from torch import Tensor
from torch.nn import functional as F

from dynaxla.observe.recorder import Recorder
from dynaxla.ops import channels_last
from dynaxla.ops.convolution_windows import ConvolutionWindows
from tests.lists import quick
from tests.tolerances import assert_close

CONVOLVE = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}
CHANNELS, GROUPS, PRODUCTS = "_convolve_channels", "_convolve_groups", "_multiply_groups"
PLANES, PADDED, PATCHES = "_convolve_planes", "_convolve_padded", "_multiply_patches"


@dataclass(frozen=True)
class ConvolutionCase:
    """The input's sizes [n, c, *space], and what is the same along all spatial axes; `outputs` are channels of one group."""

    way: str
    sizes: tuple[int, ...]
    groups: int
    outputs: int
    window: int
    stride: int = 1
    padding: int = 1
    dilation: int = 1

    @property
    def dims(self) -> int:
        return len(self.sizes) - 2

    def apply(self, x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
        convolve: Callable[..., Tensor] = CONVOLVE[self.dims, transposed]
        return convolve(x, weight, None, self.stride, self.padding, groups=self.groups, dilation=self.dilation)

    def operands(self, dtype: torch.dtype = torch.float32, transposed: bool = False) -> list[Tensor]:
        inputs = self.sizes[1] // self.groups
        first = (self.sizes[1], self.outputs) if transposed else (self.groups * self.outputs, inputs)
        made = torch.randn(self.sizes), torch.randn(*first, *[self.window] * self.dims) / inputs
        return [each.to(dtype).requires_grad_() for each in made]


CASES = {
    "few channels": ConvolutionCase(CHANNELS, (2, 8, 9, 11), 4, 3, 3),
    "few channels, strided": ConvolutionCase(CHANNELS, (2, 12, 9, 8), 3, 4, 3, stride=2, padding=2),
    "few channels of a row": ConvolutionCase(CHANNELS, (3, 8, 40), 2, 1, 5, padding=4, dilation=2),
    "single places": ConvolutionCase(CHANNELS, (2, 12, 5, 5), 3, 2, 1, padding=0),
    "many places": ConvolutionCase(GROUPS, (2, 16, 12, 13), 2, 3, 3),
    "many places, strided": ConvolutionCase(GROUPS, (3, 24, 22, 21), 3, 8, 3, stride=2, padding=2, dilation=2),
    "many places of a volume": ConvolutionCase(GROUPS, (1, 6, 8, 7, 9), 2, 2, 3),
    "few places": ConvolutionCase(PRODUCTS, (1, 24, 7, 6), 4, 5, 3),
    "few places, strided": ConvolutionCase(PRODUCTS, (2, 24, 9, 7), 3, 8, 3, stride=3, padding=2, dilation=2),
    "few places of a volume": ConvolutionCase(PRODUCTS, (1, 6, 4, 5, 3), 3, 2, 3),
    "few places, large windows": ConvolutionCase(PRODUCTS, (1, 10, 30), 2, 3, 30, padding=3),
    "many groups": ConvolutionCase(PRODUCTS, (1, 66 * 5, 18, 17), 66, 1, 3),
    "no images": ConvolutionCase(PRODUCTS, (0, 24, 7, 6), 4, 5, 3),
    "a volume": ConvolutionCase(PLANES, (2, 3, 6, 7, 5), 1, 4, 3),
    "a volume, strided": ConvolutionCase(PLANES, (1, 3, 9, 8, 7), 1, 2, 3, stride=2, padding=2, dilation=2),
    "no volumes": ConvolutionCase(PLANES, (0, 3, 6, 7, 5), 1, 4, 3),
    "a larger result": ConvolutionCase(PADDED, (2, 3, 8, 7), 1, 4, 3, padding=2),
    "a longer result": ConvolutionCase(PADDED, (2, 3, 30), 1, 4, 2, padding=8, dilation=8),
    "patches": ConvolutionCase(PATCHES, (2, 3, 17, 12), 1, 5, 4, stride=4, padding=0),
    "patches, padded": ConvolutionCase(PATCHES, (2, 3, 14, 11), 1, 5, 3, stride=3, padding=2),
    "patches of a row": ConvolutionCase(PATCHES, (2, 3, 30), 1, 4, 7, stride=7, padding=0),
    "patches of a volume": ConvolutionCase(PATCHES, (2, 3, 5, 6, 4), 1, 2, 2, stride=2, padding=0),
    "no single places": ConvolutionCase("_product", (0, 3, 8, 8), 1, 2, 1, padding=0),
    "no patches": ConvolutionCase(PATCHES, (0, 3, 8, 8), 1, 2, 2, stride=2, padding=0),
    "few places, larger windows": ConvolutionCase("", (1, 4, 60), 2, 2, 40),
}


OF_ALL_DTYPES = ("few channels", "many places", "few places", "a volume", "a larger result", "patches")
DTYPES = [(name, torch.float32) for name in CASES]
DTYPES += [(name, dtype) for name in OF_ALL_DTYPES for dtype in (torch.float64, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("name", "dtype"), quick(DTYPES, *[(name, torch.float32) for name in OF_ALL_DTYPES]), ids=str)
def test_results_and_gradients_are_eagers(name: str, dtype: torch.dtype, transposed: bool) -> None:
    case = CASES[name]
    given = case.operands(dtype, transposed)
    expected = case.apply(*given, transposed)
    actual = torch.compile(case.apply, backend="dynaxla", dynamic=False)(*given, transposed)
    assert_close(actual, expected)
    seed = torch.randn_like(expected)
    gradients = (torch.autograd.grad(result, given, seed) for result in (actual, expected))
    for mine, wanted in zip(*gradients, strict=True):
        assert_close(mine, wanted)


@pytest.mark.parametrize("name", CASES)
def test_the_way_follows_from_the_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large windows are left to XLA: what each of many sees would be as many times as large as the input."""
    case, taken = CASES[name], list[str]()
    for way in (CHANNELS, GROUPS, PRODUCTS, PLANES, PADDED, PATCHES, "_product"):
        compute = getattr(channels_last, way)

        def noted(*args: Array, way: str = way, compute: Callable[..., Array] = compute, **given: object) -> Array:
            taken.append(way)
            return compute(*args, **given)

        monkeypatch.setattr(channels_last, way, noted)
    x, weight = case.operands()
    last = [x.movedim(1, -1), weight.movedim((0, 1), (-1, -2))]
    shapes = [jax.ShapeDtypeStruct(each.shape, "float32") for each in last]
    each = [[value] * case.dims for value in (case.stride, case.padding, case.dilation)]
    jax.eval_shape(
        lambda x, kernel: channels_last.convolve(x, kernel, each[0], [(p, p) for p in each[1]], each[2], case.groups),
        *shapes,
    )
    assert taken[:1] == ([case.way] if case.way else [])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sizes[0] and case.groups > 1])
def test_what_is_not_finite_stays_in_its_group(name: str, transposed: bool) -> None:
    """A product with a matrix that is zero across groups would spread it to all."""
    case = CASES[name]
    x, weight = case.operands(transposed=transposed)
    with torch.no_grad():
        x.view(case.sizes[0], case.groups, -1)[0, 1, 3:9] = torch.nan
    actual = torch.compile(case.apply, backend="dynaxla", dynamic=False)(x, weight, transposed)
    assert torch.equal(actual.isnan(), case.apply(x, weight, transposed).isnan())
    (gradient,) = torch.autograd.grad(actual.sum(), weight)
    assert gradient.view(case.groups, -1).isnan().any(1).tolist() == [group == 1 for group in range(case.groups)]


@torch.no_grad()
def test_sizes_that_vary(recorder: Recorder) -> None:
    first, second = torch.nn.Conv2d(8, 12, 3, padding=1, groups=4), torch.nn.Conv2d(12, 24, 3, groups=2)
    net = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=1):
        for batch, height, width in ((5, 17, 19), (6, 20, 21), (7, 24, 23)):
            x = torch.randn(batch, 8, height, width)
            assert_close(compiled(x), net(x))


def test_dilated_inputs_are_xlas_own() -> None:
    """At random: the phases of a transposed convolution, also of windows shorter than the step and of edges that crop."""
    draw, checked = random.Random(0), 0
    while checked < 60:
        dims, groups = draw.choice((1, 2)), draw.choice((1, 2))
        steps, dilation, window, size = ([draw.randint(1, 5) for _ in range(dims)] for _ in range(4))
        edges = [(draw.randint(-2, 6), draw.randint(-2, 6)) for _ in range(dims)]
        windows = ConvolutionWindows((1,) * dims, tuple(edges), tuple(dilation), tuple(steps))
        x, kernel = jax.numpy.ones((2, *size, 2 * groups)), jax.numpy.ones((*window, 2, 3 * groups))
        if set(steps) == {1} or min(axis.length for axis in windows.dilated_axes(x, kernel)) < 1:
            continue
        x, kernel = (jax.numpy.asarray(torch.randn(each.shape).numpy()) for each in (x, kernel))
        axes = "HW"[2 - dims :]
        layout, highest = (f"N{axes}C", f"{axes}IO", f"N{axes}C"), jax.lax.Precision.HIGHEST
        expected = jax.lax.conv_general_dilated(
            x, kernel, [1] * dims, edges, steps, dilation, layout, groups, precision=highest
        )
        actual = channels_last._convolve_phases(x, kernel, groups, windows, highest)
        assert_close(torch.from_dlpack(actual), torch.from_dlpack(expected))
        checked += 1
