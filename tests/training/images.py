"""A network of images, and a step of it beside eager's."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.tolerances import assert_close


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, affine: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs, affine=affine)
        self.second = nn.Conv2d(outputs, outputs, 1, bias=affine)
        self.last_norm = nn.BatchNorm2d(outputs, momentum=None if affine else 0.3)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = self.last_norm(self.second(y).tanh())
        return nn.functional.gelu(y + self.skip(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(3, 8, affine=True), Block(8, 16, affine=False)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(24, 5)
        self.gain = nn.Parameter(torch.randn(16, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.one(x)
        z = self.two(self.pool(y)) * self.gain
        z = torch.cat([z, self.pool(y)], 1)
        return (
            self.head(z.mean([2, 3])),
            z.amax(1),
            z.sum((0, 2, 3)),
            z.sum((1, 3), keepdim=True),
            z.sum(2, keepdim=True),
            z.amax(3, keepdim=True),
            z.sum((0, 1)),
            z,
            (z > 0).sum((0, 2)),
        )


def check_step(device: str, memory_format: torch.memory_format) -> None:
    """Checks results, gradients, running statistics and strides of steps at two batch sizes."""
    theirs = Net().double()
    mine = copy.deepcopy(theirs).to(device)
    compiled = torch.compile(mine, backend="dynaxla")
    for batch in (2, 2, 3):
        x = torch.randn(batch, 3, 12, 10, dtype=torch.float64).contiguous(memory_format=memory_format)
        y = x.detach().to(device)
        expected, found = theirs(x.requires_grad_()), compiled(y.requires_grad_())
        for left, right in zip(found, expected, strict=True):
            assert left.stride() == right.stride()
            assert_close(left.cpu(), right)
        for results in (expected, found):
            torch.stack([each.pow(2).mean() for each in results if each.is_floating_point()]).sum().backward()
        pairs = [(y.grad, x.grad)]
        pairs += [(p.grad, q.grad) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True)]
        for gradient, right_gradient in pairs:
            assert gradient is not None
            assert right_gradient is not None
            assert gradient.stride() == right_gradient.stride()
            assert_close(gradient.cpu(), right_gradient)
        for left, right in zip(mine.buffers(), theirs.buffers(), strict=True):
            assert_close(left.cpu(), right)
