"""Tensors that executables do not take (sparse, quantized, on meta) leave what touches them to eager, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from dynaxla.diagnostics import ReasonId
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x * 2, 0.1, 0, torch.quint8).dequantize() + 1


def _twice_sparse(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = (x * 2).to_sparse()
    return made, made


Given = Callable[[], tuple[Any, ...]]
CALLS: dict[str, tuple[Callable[..., Any], Given, ReasonId | None]] = {
    "on meta": (lambda x, y: (x.t() * 2, y + 1), lambda: (torch.empty(3, 4, device="meta"), torch.randn(3)), None),
    "quantized inside": (_quantized, lambda: (torch.randn(4),), ReasonId.NO_LOWERING),
    "sparse inside": (lambda x: (x.to_sparse() * 2).to_dense() + 1, lambda: (torch.randn(3, 4),), None),
    "sparse": (lambda x, y: x @ y + 1, lambda: (torch.eye(3).to_sparse(), torch.randn(3, 4)), None),
    "sparse twice": (_twice_sparse, lambda: (torch.randn(3, 4),), None),
    "of oneDNN's layout": (
        lambda x: (x * 2).to_dense() + 1,
        lambda: (torch.randn(3, 4).to_mkldnn(),),
        ReasonId.UNSUPPORTED_TENSOR,
    ),
    "two tensors in one": (lambda x: (x.sin() * 2).a, lambda: (TwoTensor(torch.randn(3), torch.randn(3)),), None),
    "eight bits": (lambda x: x.to(torch.float8_e4m3fn).float() * 2, lambda: (torch.randn(4),), None),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_an_unusual_tensor(name: str, recorder: Recorder) -> None:
    function, given, reason = CALLS[name]
    compiled = torch.compile(function, backend="dynaxla")
    known = len(recorder.snapshot().fallbacks)
    for _ in range(2):
        args = given()
        results = [call(*args) for call in (compiled, function)]
        for actual, expected in zip(*map(torch.utils._pytree.tree_leaves, results), strict=True):
            if expected.device.type == "meta":
                assert (actual.shape, actual.device) == (expected.shape, expected.device)
            else:
                assert_close(actual.to_dense(), expected.to_dense())
    noted = recorder.snapshot().fallbacks[known:]
    assert reason is None or any(reason.value in line for line in noted)
    assert not any(ReasonId.INTERNAL_ERROR.value in line for line in noted)


def test_a_plain_attribute_of_another_size_in_another_module() -> None:
    class Shift(torch.nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.shift = torch.randn(rows, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    for rows in (8, 16, 24, 8):
        net, x = Shift(rows), torch.randn(rows, 2)
        compiled = torch.compile(net, backend="dynaxla")
        assert_close(compiled(x), net(x))
        net.shift = net.shift * 2
        assert_close(compiled(x), net(x))


@torch.no_grad()
def test_indices_of_triangles_where_sizes_vary() -> None:
    def fixed(x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.triu_indices(4, 4, 1)[0]]

    def varying(x: torch.Tensor) -> torch.Tensor:
        return torch.tril_indices(x.shape[0], x.shape[0]) + x.shape[1]

    for function in (fixed, varying):
        compiled = torch.compile(function, backend="dynaxla", dynamic=True)
        for shape in ((3, 5), (4, 5), (7, 9)):
            x = torch.randn(shape)
            assert_close(compiled(x), function(x))


def test_fake_tensors_are_given_shapes_alone(recorder: Recorder) -> None:
    compiled = torch.compile(lambda x: x.sin() + x, backend="dynaxla")
    with FakeTensorMode():
        fake = torch.randn(3)
        assert compiled(fake).shape == (3,)
    assert "unsupported_tensor; an input is a fake tensor" in recorder.snapshot().fallbacks[-1]
    x = torch.randn(3)
    assert_close(compiled(x), x.sin() + x)
    assert compiled(fake).shape == (3,)


@pytest.mark.parametrize("size", [40, 1 << 19])
@torch.no_grad()
def test_zeros_without_memory_behind_a_tensor_that_has_some(size: int) -> None:
    """Autograd makes them; they meet a program that was compiled for memory, one that is copied or one read where it lies."""
    compiled = torch.compile(lambda x: x * 2 + 1, backend="dynaxla", dynamic=False)
    compiled(torch.randn(size))
    for _ in range(4):
        assert_close(compiled(torch._efficientzerotensor((size,))), torch.ones(size))
