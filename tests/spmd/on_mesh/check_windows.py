"""Windows over images, and spectra of them, which a mesh splits along height and width: eager's results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaxla
from dynaxla.mesh import Mesh
from tests.tolerances import assert_close


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.hfft2(x)


IMAGES = (4, 8, 16, 16)
NETS: Mapping[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "3 x 3": lambda: (nn.Conv2d(8, 12, 3, padding=1), IMAGES),
    "patches": lambda: (nn.Conv2d(8, 12, 4, stride=4), IMAGES),
    "dilated": lambda: (nn.Conv2d(8, 12, 3, dilation=2), IMAGES),
    "groups": lambda: (nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2), IMAGES),
    "depthwise": lambda: (nn.Conv2d(8, 8, 3, padding=1, groups=8), IMAGES),
    "row": lambda: (nn.Conv1d(8, 12, 3, padding=1), (4, 8, 16)),
    "volume": lambda: (nn.Conv3d(8, 4, 3, padding=1), (4, 8, 8, 8, 4)),
    "transposed": lambda: (nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1), IMAGES),
    "largest": lambda: (nn.MaxPool2d(3, 2, 1), IMAGES),
    "mean": lambda: (nn.AvgPool2d(3, 2, 1), IMAGES),
    "reflected": lambda: (nn.ReflectionPad2d(2), IMAGES),
    "spectrum": lambda: (Spectrum(), IMAGES),
    "upsampled": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGES),
}
SPECS = ((None, None, "data"), ("model", None, "data"), (None, "model", "data"), (None, None, "data", "model"))
"""Of the axes of the mesh: one unused, one along the batch, one along channels, both along the image."""


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_images_that_are_split(mesh: Mesh, name: str, spec: tuple[Any, ...]) -> None:
    net, shape = NETS[name]()
    if len(spec) > len(shape):
        pytest.skip("it has no width")
    there = copy.deepcopy(net).to("dynaxla")
    x = torch.randn(shape)
    _compare(net, there, x, dynaxla.shard(x, mesh, spec))


@pytest.mark.parametrize("split", [("model",), (None, "model")], ids=["results", "inputs"])
def test_channels_of_weights_that_are_split(mesh: Mesh, split: tuple[Any, ...]) -> None:
    net = nn.Conv2d(8, 12, 3, padding=1)
    there = dynaxla.shard(copy.deepcopy(net).to("dynaxla"), mesh, {"weight": split})
    x = torch.randn(IMAGES)
    _compare(net, there, x, dynaxla.shard(x, mesh, (None, None, "data")))


def test_a_kernel_that_is_split(mesh: Mesh) -> None:
    x, kernel = torch.randn(IMAGES), torch.randn(12, 8, 8, 8)
    made = dynaxla.shard(x, mesh, (None, None, "data")), dynaxla.shard(kernel, mesh, (None, None, "model"))
    torch._dynamo.reset()
    assert_close(torch.compile(F.conv2d, backend="dynaxla")(*made).cpu(), F.conv2d(x, kernel))


def _compare(net: nn.Module, there: nn.Module, x: Tensor, image: Tensor) -> None:
    torch._dynamo.reset()
    x.requires_grad_()
    image = image.detach().requires_grad_()
    expected = net(x)
    got = torch.compile(there, backend="dynaxla", options={"fallback": "error"})(image)
    weight = torch.randn_like(expected)
    assert_close(got.cpu(), expected)
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *net.parameters()])
    found = torch.autograd.grad((got * weight.to("dynaxla")).sum(), [image, *there.parameters()])
    for mine, theirs in zip(found, wanted, strict=True):
        assert_close(mine.cpu(), theirs)
