"""The rules on padding and resampling against eager torch, alone and through torch.compile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from dynaxla.custom_ops.weighted_sums import WEIGHTED_SUMS
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.promotion import JNP_DTYPES
from dynaxla.ops.resampling import check_nearest_layout, check_width
from dynaxla.ops.resampling_weights import legacy_nearest_taps, nearest_taps
from tests.lists import quick
from tests.ops.rule_check import (
    Call,
    Catch,
    draw_samples,
    is_close,
    run_rules,
    run_sample,
    targets_of,
    to_torch,
)
from tests.tolerances import assert_close

aten = torch.ops.aten
TARGETS = targets_of("resampling")

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
)
QUICK_BACKWARD = (torch.float32, torch.bfloat16)  # the others take the same path
HALF = (torch.bfloat16, torch.float16)
SINGLE = (torch.float32, torch.complex64)

OPINFO_NAMES = (
    "constant_pad_nd",
    "nn.functional.pad",
    "nn.functional.interpolate",
    "nn.functional.upsample_nearest",
    "nn.functional.upsample_bilinear",
    "nn.functional.grid_sample",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "nn.functional.unfold",
)


def in_float32(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Eager torch in float32 where the call is in a 16-bit float: some of its 16-bit kernels round at every step."""
    wide = tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x, (args, kwargs))
    return tree_leaves(target(*wide[0], **wide[1]))


def scale_of(tensor: torch.Tensor) -> float:
    """At least 1, or the largest finite magnitude: sums that cancel keep the rounding of their largest terms."""
    finite = tensor[tensor.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def assert_same(target: OpOverload, *args: Any) -> None:
    assert_all_same([Call.of(target, *args)])


def assert_all_same(calls: Sequence[Call]) -> None:
    for call, results in zip(calls, run_rules(calls), strict=True):
        assert_agrees(call, results)


def assert_agrees(call: Call, results: Any) -> None:
    """Compare what the rule gave with eager; a 16-bit float may instead be what float32 gives, rounded once."""
    target, args, kwargs, wanted = call
    said = f"the call is {target}{args}, {kwargs}"
    assert isinstance(results, tuple) == isinstance(wanted, tuple), said
    is_leaf = {"is_leaf": lambda leaf: leaf is None}
    results, wanted = tree_leaves(results, **is_leaf), tree_leaves(wanted, **is_leaf)
    for position, (result, eager) in enumerate(zip(results, wanted, strict=True)):
        if eager is None:
            assert result is None, said
            continue
        assert tuple(result.shape) == tuple(eager.shape), said
        assert result.dtype == JNP_DTYPES[eager.dtype], said
        actual, eager = to_torch(result), eager.detach().resolve_conj().resolve_neg()
        if eager.dtype in HALF and not is_close(actual, eager):
            eager = in_float32(target, args, kwargs)[position].to(eager.dtype)
        tolerance = {"rtol": 2e-5, "atol": 2e-5 * scale_of(eager)} if eager.dtype in SINGLE else {}
        torch.testing.assert_close(
            actual, eager, equal_nan=True, msg=lambda text, said=said: f"{text}\n{said}", **tolerance
        )


class CatchAll(Catch):
    """Collects also the calls that a check refuses."""

    def is_wanted(self, target: Any, args: Any, kwargs: Any) -> bool:
        return not self.is_enough(target)


OTHERS = ("circular", "area")  # made of slices and of pooling
INFOS = [info for info in op_db if info.name in OPINFO_NAMES and info.variant_test_name not in OTHERS]


@pytest.mark.parametrize("info", INFOS, ids=[f"{info.name}-{info.variant_test_name}" for info in INFOS])
def test_rules_agree_with_eager_on_opinfo_samples(info: Any, full: bool) -> None:
    catch = CatchAll(TARGETS, full)
    for dtype in DTYPES:
        if dtype not in info.dtypes:
            continue
        catch.dtype = dtype
        backward = dtype in (DTYPES if full else QUICK_BACKWARD) and dtype in info.backward_dtypes
        backward = backward and dtype.is_floating_point and info.supports_autograd
        for sample in draw_samples(info, dtype, backward):
            with catch:
                run_sample(info, sample, backward)
    assert catch.calls
    assert_all_same(catch.calls)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if not dtype.is_floating_point:
        return torch.randint(0, 256, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# Sizes that grow, shrink and stay, some with a scale factor that does not divide; the last is no small image.
RESIZED = [
    ((7, 5), (14, 5), None), ((7, 5), (3, 11), None), ((7, 5), (1, 2), None), ((1, 1), (4, 3), None),
    ((3, 8), (6, 8), (2.3, 1.1)), ((9, 4), (5, 10), (0.6, 2.5)), ((5, 40), (90, 60), (18.1, 1.5)),
]  # fmt: skip
WITH_CORNERS = ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
LANCZOS = ("_upsample_lanczos2d_aa",)
NEAREST = ("upsample_nearest2d", "_upsample_nearest_exact2d")


@pytest.mark.parametrize("name", WITH_CORNERS + LANCZOS + NEAREST)
@pytest.mark.parametrize(
    "dtype",
    quick([torch.float32, torch.float64, torch.bfloat16, torch.uint8], torch.float32, torch.bfloat16, torch.uint8),
)
def test_images_are_resized_as_in_eager(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and name.endswith("_aa"):
        pytest.skip("eager has no such kernel")
    target, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    calls = []
    for size, out, factors in RESIZED:
        for align_corners in (False,) if name in NEAREST else (False, True):
            options = (*(() if name in NEAREST else (align_corners,)), *(factors or ()))
            calls.append(Call.of(target, image(2, 3, *size, dtype=dtype), list(out), *options))
            calls.append(Call.of(target, image(1, 5, *size, dtype=dtype), list(out), *options))
            if dtype.is_floating_point:
                grad = image(2, 3, *out, dtype=dtype)
                calls.append(Call.of(backward, grad, list(out), [2, 3, *size], *options))
    assert_all_same(calls)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("mode", ["nearest", "_nearest_exact", "linear"])
@pytest.mark.parametrize("factor", [None, 2.0, 0.7])
def test_rows_and_volumes_are_resized_as_in_eager(rank: int, mode: str, factor: float | None) -> None:
    linear = {1: "upsample_linear1d", 3: "upsample_trilinear3d"}[rank]
    name = linear if mode == "linear" else f"{'_' if 'exact' in mode else ''}upsample_{mode.lstrip('_')}{rank}d"
    target, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    size = [6, 4, 5][:rank]
    out = [9, 4, 3][:rank] if factor is None else [int(n * factor) for n in size]
    calls = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        for align_corners in (False, True) if mode == "linear" else (False,):
            options = [*([align_corners] if mode == "linear" else []), *[factor] * rank]
            calls.append(Call.of(target, image(2, 3, *size, dtype=dtype), out, *options))
            calls.append(Call.of(backward, image(2, 3, *out, dtype=dtype), out, [2, 3, *size], *options))
    assert_all_same(calls)


def test_the_nearest_element_is_eagers_for_many_sizes() -> None:
    for kind, dtype in ((np.float32, torch.float32), (np.float64, torch.float64)):
        for size in (*range(1, 20), 77, 129, 200):
            x = torch.arange(size, dtype=dtype)[None, None]
            whole = [(out, None) for out in (*range(1, 60), 64, 100, 255, 400)]
            scaled = [(int(size * f), f) for f in (0.3, 0.7, 1.3, 1.99, 2.0, 2.3, 3.3) if int(size * f)]
            for out, factor in whole + scaled:
                for exact in (False, True):
                    name = "_upsample_nearest_exact" if exact else "upsample_nearest"
                    eager = getattr(aten, f"{name}1d")(x, [out], factor).flatten().long().numpy()
                    assert np.array_equal(nearest_taps(size, out, factor, exact, kind).index[:, 0], eager)
                    grad = getattr(aten, f"{name}1d_backward")(torch.ones(1, 1, out), [out], [1, 1, size], factor)
                    index = legacy_nearest_taps(size, out, factor, exact).index[:, 0]
                    assert np.array_equal(np.bincount(index, minlength=size), grad.flatten().numpy())


INF, NAN = math.inf, math.nan
MARKED = torch.tensor([[[[1.0, INF, 2.0, 3.0], [4.0, 5.0, NAN, 6.0], [7.0, 8.0, 9.0, -INF]]]])
WEIGHTS = torch.tensor([True, False, True])

EDGES: list[tuple[OpOverload, tuple[Any, ...]]] = [
    *[(aten.constant_pad_nd.default, (image(2, 3, 4), pad, 1.5)) for pad in ([1, 2], [-1, 2, 0, -2], [0] * 6, [])],
    (aten.constant_pad_nd.default, (WEIGHTS, [1, 1], True)),
    (aten.constant_pad_nd.default, (WEIGHTS, [2, -1])),
    (aten.constant_pad_nd.default, (torch.arange(4), [1, 1], 2.7)),
    (aten.constant_pad_nd.default, (image(3), [1, 1], -INF)),
    (aten.constant_pad_nd.default, (image(2, 0, 3), [1, 1, 2, 1], 4)),
    *[(getattr(aten, f"{kind}_pad1d").default, (image(2, 6), p)) for kind in ("reflection", "replication")
      for p in ([3, 2], [-1, 2], [3, -2], [-1, -3])],
    *[(getattr(aten, f"{kind}_pad1d_backward").default, (image(2, 6 + sum(p)), image(2, 6), p))
      for kind in ("reflection", "replication") for p in ([3, 2], [-1, 2], [3, -2], [-1, -3])],
    *[(getattr(aten, f"{kind}_pad2d").default, (image(3, 4, 5), [1, 2, -1, 3]))
      for kind in ("reflection", "replication")],
    *[(getattr(aten, f"{kind}_pad3d_backward").default,
       (image(2, 3, 6, 8, 7), image(2, 3, 4, 5, 5), [1, 1, 2, 1, 1, 1])) for kind in ("reflection", "replication")],
    *[(getattr(aten, f"{name}").default, (MARKED, [5, 7], False)) for name in WITH_CORNERS],
    *[(getattr(aten, f"{name}").default, (MARKED, [2, 2], False)) for name in WITH_CORNERS],
    *[(getattr(aten, f"{name}").default, (MARKED, [3, 4], True)) for name in WITH_CORNERS],
    (aten.im2col.default, (image(3, 7, 6), [3, 2], [2, 1], [1, 2], [2, 3])),
    (aten.im2col.default, (torch.tensor([[[[True, False], [False, True]]]]), [2, 1], [1, 1], [1, 0], [1, 1])),
    (aten.col2im.default, (image(12, 12), [7, 6], [2, 2], [1, 1], [0, 1], [2, 2])),
    (aten.col2im.default, (image(2, 12, 12), [7, 6], [3, 2], [2, 1], [1, 1], [2, 2])),
]  # fmt: skip


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """What the rules give, from one executable for all edges."""
    return run_rules([Call(target, args, {}, None) for target, args in EDGES])


@pytest.mark.parametrize("place", range(len(EDGES)), ids=[f"{place}-{case[0]}" for place, case in enumerate(EDGES)])
def test_rules_agree_with_eager_at_the_edges(place: int, results: list[Any]) -> None:
    target, args = EDGES[place]
    assert_agrees(Call.of(target, *args), results[place])


MODES_OF_GRIDS = list(itertools.product((0, 1, 2), (0, 1, 2), (False, True)))


@pytest.mark.parametrize(
    ("mode", "padding", "align_corners"),
    quick(MODES_OF_GRIDS, *(each for each in MODES_OF_GRIDS if sum(each) % 2)),  # each two of the three together
)
@pytest.mark.parametrize("dtype", quick([torch.float32, torch.float64], torch.float32))
def test_grids_are_sampled_as_in_eager(mode: int, padding: int, align_corners: bool, dtype: torch.dtype) -> None:
    plane = image(2, 5, 6, 2, dtype=dtype) * 1.5
    options = (mode, padding, align_corners)
    calls = []
    for sizes in ((4, 7), (1, 3)):
        x, grad = image(2, 3, *sizes, dtype=dtype), image(2, 3, 5, 6, dtype=dtype)
        calls.append(Call.of(aten.grid_sampler_2d.default, x, plane, *options))
        for mask in ([True, True], [False, True]):
            calls.append(Call.of(aten.grid_sampler_2d_backward.default, grad, x, plane, *options, mask))
    if mode != 2:
        space = image(2, 3, 5, 6, 3, dtype=dtype) * 1.5
        x, grad = image(2, 3, 4, 7, 5, dtype=dtype), image(2, 3, 3, 5, 6, dtype=dtype)
        calls.append(Call.of(aten.grid_sampler_3d.default, x, space, *options))
        calls.append(Call.of(aten.grid_sampler_3d_backward.default, grad, x, space, *options, [True, True]))
    assert_all_same(calls)


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_grids_reach_far_outside_as_in_eager(mode: int, padding: int) -> None:
    # where float32 has no fractions left, what reflection gives is rounding error
    far = [1e4, -1e4] if padding == 2 else [1e30, -1e30]
    grid = torch.tensor([-1.0, 1.0, *far, INF, -INF, NAN, 0.25])
    plane = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1)[None]
    assert_same(aten.grid_sampler_2d.default, image(1, 2, 5, 4), plane, mode, padding, False)


def refusal(
    check: Callable[[torch.fx.Node], str | None], target: OpOverload, x: torch.Tensor, *rest: Any
) -> str | None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    return check(graph.call_function(target, (node, *rest)))


def test_nearest_refuses_large_channels_last_images() -> None:
    target = aten.upsample_nearest2d.default
    last = image(1, 4, 50, 50).to(memory_format=torch.channels_last)
    assert refusal(check_nearest_layout, target, last, [100, 100])
    assert refusal(check_nearest_layout, target, last, [50, 50]) is None
    assert refusal(check_nearest_layout, target, last.contiguous(), [100, 100]) is None


def test_results_one_element_wide_are_eagers() -> None:
    antialiased, plain = aten._upsample_bilinear2d_aa.default, aten.upsample_bilinear2d.default
    assert refusal(check_width, antialiased, image(1, 3, 7, 5), [2, 1], False)
    assert refusal(check_width, antialiased, image(1, 3, 7, 5), [1, 1], False) is None
    assert refusal(check_width, plain, image(1, 3, 7, 5, dtype=torch.uint8), [2, 1], False)
    assert refusal(check_width, plain, image(1, 3, 7, 5), [2, 1], False) is None
    assert_same(plain, image(1, 3, 7, 5), [2, 1], False)
    assert_same(antialiased, image(1, 3, 7, 5), [1, 1], False)


def test_elements_that_are_not_read_may_be_no_numbers() -> None:
    is_read = torch.tensor([[True, True, False, False], [False, True, True, True], [False] * 4])
    for dtype in (torch.float32, torch.float64):
        x, weights = torch.randn(2, 3, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
        assert_same(WEIGHTED_SUMS, x, weights, is_read)
        for value in (torch.nan, torch.inf, -torch.inf):
            x[0, 1, 0], x[1, 2, 3] = value, torch.inf
            assert_same(WEIGHTED_SUMS, x, weights, is_read)


def test_bytes_are_weighed_exactly() -> None:
    x = torch.randint(0, 256, (3, 500), dtype=torch.uint8)
    x[0] = 255
    weights = torch.randint(-(1 << 14), 1 << 14, (7, 500), dtype=torch.int32)
    assert_same(WEIGHTED_SUMS, x, weights, weights % 3 > 0)


ROW, PLANE, VOLUME = image(2, 3, 8), image(2, 4, 8, 6), image(2, 3, 4, 6, 5)
GRID, GRID_3D = image(2, 5, 7, 2) * 0.6, image(2, 3, 4, 5, 3) * 0.6
CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    **{f"pad-{mode}-{x.ndim}": (lambda x, mode=mode: F.pad(x, (2, 1, 1, 3, 1, 0)[: 2 * (x.ndim - 2)], mode), (x,))
       for mode in ("constant", "reflect", "replicate", "circular") for x in (ROW, PLANE, VOLUME)},
    **{f"{mode}-{x.ndim}-{factor}": (lambda x, mode=mode, f=factor: F.interpolate(x, scale_factor=f, mode=mode), (x,))
       for mode, x in (("nearest", ROW), ("nearest", PLANE), ("nearest", VOLUME), ("nearest-exact", PLANE),
                       ("linear", ROW), ("bilinear", PLANE), ("trilinear", VOLUME), ("bicubic", PLANE))
       for factor in (2.0, 0.7)},
    **{f"{mode}-corners": (lambda x, mode=mode: F.interpolate(x, (5, 9), mode=mode, align_corners=True), (PLANE,))
       for mode in ("bilinear", "bicubic")},
    **{f"{mode}-antialias": (lambda x, mode=mode: F.interpolate(x, (3, 9), mode=mode, antialias=True), (PLANE,))
       for mode in ("bilinear", "bicubic")},
    **{f"grid-{mode}-{padding}": (
        lambda x, g, m=mode, p=padding: F.grid_sample(x, g, m, p, align_corners=False), (PLANE, GRID))
       for mode in ("bilinear", "nearest", "bicubic") for padding in ("zeros", "border", "reflection")},
    "grid-volume": (lambda x, g: F.grid_sample(x, g, align_corners=True), (VOLUME, GRID_3D)),
    "affine-grid": (lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False), (image(2, 2, 3),)),
    "affine-grid-3d": (lambda t: F.affine_grid(t, [2, 3, 4, 5, 6], align_corners=True), (image(2, 3, 4),)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1, stride=2), (PLANE,)),
    "fold": (lambda x: F.fold(x, (8, 6), 3, padding=1), (image(2, 36, 48),)),
    "pixel-shuffle": (lambda x: F.pixel_shuffle(x, 2), (PLANE,)),
    "pixel-unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (PLANE,)),
    "channel-shuffle": (lambda x: F.channel_shuffle(x, 2), (PLANE,)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    quick(CALLS, "pad-reflect-4", "nearest-4-2.0", "trilinear-5-0.7", "grid-bicubic-zeros", "unfold", "affine-grid"),
)
def test_compiled_calls_agree_with_eager(name: str, recorder: Recorder) -> None:
    function, inputs = CALLS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=False)
    with recorder.expect(compiles=1):
        actual = compiled(*inputs)
    assert_close(actual, function(*inputs))


COMPILED_GRIDS = ("grid-bilinear-zeros", "grid-nearest-border", "grid-bicubic-reflection", "grid-volume")


@pytest.mark.parametrize(
    "name", quick(CALLS, *(name for name in CALLS if not name.startswith("grid-") or name in COMPILED_GRIDS))
)
def test_compiled_gradients_agree_with_eager(name: str, recorder: Recorder) -> None:
    function, inputs = CALLS[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    compiled = torch.compile(function, backend="dynaxla", dynamic=False)
    expected = function(*leaves)
    with recorder.expect(compiles=2):
        actual = compiled(*leaves)
        gradients = torch.autograd.grad(actual, leaves, expected.detach().cos())
    assert_close(actual.detach(), expected.detach())
    for gradient, eager in zip(gradients, torch.autograd.grad(expected, leaves, expected.detach().cos()), strict=True):
        assert_close(gradient, eager)
