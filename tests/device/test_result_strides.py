"""Strides of results and of gradients are those of the CPU's kernels: images in channels-last stay so."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

import dynaxla
from dynaxla.types import has_strides
from tests.lists import quick
from tests.tolerances import assert_close

D = "dynaxla"


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


NETS: dict[str, nn.Module] = {
    "conv": nn.Conv2d(4, 6, 3, padding=1),
    "channels-last conv": nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "transposed": nn.ConvTranspose2d(4, 3, 2, 2),
    "batch norm": nn.BatchNorm2d(4),
    "group norm": nn.GroupNorm(2, 4),
    "max pool": nn.MaxPool2d(2),
    "average pool": nn.AvgPool2d(2),
    "adaptive pool": nn.AdaptiveAvgPool2d(3),
    "adaptive max pool": nn.AdaptiveMaxPool2d(2),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "zeros": nn.ZeroPad2d(1),
    "reflection": nn.ReflectionPad2d(1),
    "pixel shuffle": nn.PixelShuffle(2),
    "pixel unshuffle": nn.PixelUnshuffle(2),
    "channel shuffle": nn.ChannelShuffle(2),
    "gelu": nn.GELU(),
    "prelu": nn.PReLU(),
    "softmax": nn.Softmax(1),
    "glu": nn.GLU(1),
    "cat": Function(lambda x: torch.cat([x, x * 2], 1)),
    "stack": Function(lambda x: torch.stack([x, x])),
    "mean": Function(lambda x: x.mean((2, 3), keepdim=True) + x),
    "block": nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)),
}


def results(net: nn.Module, device: str, batch: int) -> list[Tensor]:
    net = copy.deepcopy(net).to(device)
    images = torch.linspace(-1, 1, batch * 256).reshape(batch, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    x = images.to(device).requires_grad_()
    y = net(x)
    weights = torch.arange(float(y.numel())).sin().reshape(y.shape)  # of squares a norm's gradient is rounding alone
    (y * weights.to(device)).sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("name", quick(NETS, "conv", "cat", "zeros", "pixel shuffle", "block"))
def test_images_in_channels_last(name: str, batch: int) -> None:
    torch.manual_seed(0)
    for expected, found in zip(results(NETS[name], "cpu", batch), results(NETS[name], D, batch), strict=True):
        assert has_strides(found, expected.stride())
        if found.dim() == 4:
            for memory_format in (torch.channels_last, torch.contiguous_format):
                is_so = expected.is_contiguous(memory_format=memory_format)
                assert found.is_contiguous(memory_format=memory_format) == is_so
        assert_close(found.cpu(), expected)


@pytest.mark.parametrize("module", [nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ReflectionPad3d, nn.ReplicationPad3d])
def test_gradients_of_pads(module: type[nn.Module]) -> None:
    dims = 4 if "2d" in module.__name__ else 5
    memory_format = torch.channels_last if dims == 4 else torch.channels_last_3d
    for kept in (torch.contiguous_format, memory_format):
        x = torch.randn(*(2, 3, 4, 5, 6)[:dims]).contiguous(memory_format=kept)
        gradients = []
        for device in ("cpu", D):
            there = x.to(device).requires_grad_()  # a leaf's `.grad` would have its strides in any case
            gradients += torch.autograd.grad(module(1)(there).square().sum(), there)
        assert gradients[1].stride() == gradients[0].stride()
        assert_close(gradients[1].cpu(), gradients[0])


def test_images_in_channels_last_when_collected() -> None:
    with dynaxla.device_mode("fused"):
        test_images_in_channels_last("block", 2)


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("name", quick(NETS, "conv", "average pool", "cat", "zeros"))
def test_every_second_pixel_of_images_in_channels_last(name: str, batch: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(batch, 4, 16, 16).contiguous(memory_format=torch.channels_last)
    every_second = (slice(None), slice(None), slice(None, None, 2), slice(1, None, 2))
    net = copy.deepcopy(NETS[name])
    with torch.no_grad():
        expected = net(images[every_second])
        found = net.to(D)(images.to(D)[every_second])
    assert has_strides(found, expected.stride())
    assert_close(found.cpu(), expected)


def test_strides_of_sizes_that_vary() -> None:
    pad = nn.ZeroPad2d(1)
    for size in range(3, 30):
        images = torch.randn(2, 3, size, 5).contiguous(memory_format=torch.channels_last)
        found, expected = pad(images.to(D)), pad(images)
        assert found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)


OTHERS = {
    "nn.functional.max_unpool1d grad": "torch's fake kernel goes by the strides of dims of one element",
}
"""Ops of torch's database whose strides are others, and whose they are."""


def _in_columns(x: Tensor) -> Tensor:
    """A copy in channels-last, or with the last two dims exchanged in memory."""
    if x.layout is not torch.strided or x.dim() < 2:
        return x.detach().clone()
    order = [1, 0] if x.dim() == 2 else [0, *range(2, x.dim()), 1]
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return x.detach().permute(order).contiguous().permute(inverse)


def strides_differ(op: Any) -> list[Any]:
    """The results of two of an op's samples whose strides are others than the CPU's."""
    samples = sorted(
        op.sample_inputs("cpu", torch.float32),
        key=lambda s: (
            -max([x.dim() for x in tree_leaves((s.input, s.args, s.kwargs)) if isinstance(x, Tensor)], default=0)
        ),
    )
    differ = []
    for sample in samples[:: max(1, len(samples) // 2)][:2]:
        call = tree_map_only(Tensor, _in_columns, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        if any(x.layout is not torch.strided for x in tree_leaves(call) if isinstance(x, Tensor)):
            continue
        moved = tree_map_only(Tensor, lambda x: x.to(D), call)
        expected, found = (op.op(first, *rest, **named) for first, rest, named in (call, moved))
        for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
            if (
                isinstance(one, Tensor)
                and one.numel()
                and one.layout is torch.strided
                and not has_strides(other, one.stride())
            ):
                differ.append((tuple(one.shape), one.stride(), other.stride()))
    return differ


OPS = {
    f"{op.name} {op.variant_test_name}".strip(): op
    for op in op_db
    if torch.float32 in op.dtypes and "jiterator" not in op.name  # which runs on CUDA alone
}


@pytest.mark.parametrize(
    "name", quick(OPS, "stack", "rand_like", "nn.functional.avg_pool2d", "unsafe_chunk", "stft", "resize_as_")
)
def test_strides_of_torchs_database(name: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            differ = strides_differ(OPS[name])
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            pytest.skip("eager or the device raises: tests of the op's own")
    assert bool(differ) == (name in OTHERS), differ


def test_pools_of_one_volume_keep_its_order() -> None:
    x = torch.randn(2, 4, 6, 6, 6).to(memory_format=torch.channels_last_3d)[0]
    for ours, eagers in zip(
        *(nn.functional.max_pool3d(each, 2, return_indices=True) for each in (x.to(D), x)), strict=True
    ):
        assert_close(ours.cpu(), eagers)
        assert ours.stride() == eagers.stride()
