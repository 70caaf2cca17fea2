"""Results are to autograd, to later writes and to one another what eager's are: no views of their own, memory shared alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lists import quick
from tests.tolerances import assert_close

MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: torch.zeros_like(x.sin().t()),
    "transposed and computed": lambda x: x.t() * 2,
    "channels last": lambda x: (x[None, None] * torch.ones(2, 3, 1, 1)).to(memory_format=torch.channels_last),
    "expanded and cloned": lambda x: x.sin()[:1].expand(4, -1).clone(),
    "detached": lambda x: x.sin().t().contiguous().t().detach() + 1,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", quick(MODES, "grad", "inference"))
@pytest.mark.parametrize("name", OWN)
def test_a_result_with_memory_of_its_own_is_no_view(name: str, mode: str, dynamic: bool) -> None:
    compiled = torch.compile(OWN[name], backend="dynaxla", dynamic=dynamic)
    for rows in (5, 6):
        with MODES[mode]():
            x = torch.randn(rows, 7, requires_grad=mode == "grad")
            actual, expected = compiled(x), OWN[name](x)
        assert (actual._is_view(), actual._base is None) == (expected._is_view(), expected._base is None)
        assert actual.stride() == expected.stride()
        assert actual.is_inference() == expected.is_inference()


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_a_result_can_be_written_to_after_a_break(mode: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(x.sin().t())
        torch._dynamo.graph_break()
        z[0] = x[:, 0]
        return z

    compiled = torch.compile(model, backend="dynaxla")
    with MODES[mode]():
        for rows in (3, 5):
            x = torch.randn(rows, 4, requires_grad=mode == "grad")
            assert_close(compiled(x).detach(), model(x).detach())


SHARED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a result and its transpose": lambda x: (lambda y: (y, y.t()))(x.sin()),
    "a result and its rows": lambda x: (lambda y: (y[1:], y[0], y))(x.sin()),
    "two views that overlap": lambda x: (lambda y: (y[:3], y[1:]))(x.sin()),
    "pieces": lambda x: x.sin().split(2),
    "rows": lambda x: x.sin().unbind(0),
    "a view of a written one": lambda x: (lambda y: (y.add_(1), y.t()))(x.sin()),
    "views of an input": lambda x: (x[1:], x.t(), x.sin()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("name", SHARED)
def test_results_share_memory_as_in_eager(name: str, mode: str, dynamic: bool) -> None:
    compiled = torch.compile(SHARED[name], backend="dynaxla", dynamic=dynamic)
    with MODES[mode]():
        for rows in (5, 6):
            x = torch.randn(rows, 4)
            found = []
            for function in (compiled, SHARED[name]):
                given = x.clone()
                results = function(given)
                for number, result in enumerate(results):
                    result.mul_(number + 2)
                found.append([given, *results])
            for actual, expected in zip(*found, strict=True):
                assert_close(actual, expected)
                assert actual._is_view() == expected._is_view()


@torch.no_grad()
def test_a_write_after_a_break_is_seen_in_the_views() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.t()
        torch._dynamo.graph_break()
        y.add_(1)
        return z * 2

    x = torch.randn(3, 4)
    assert_close(torch.compile(model, backend="dynaxla")(x), model(x))


ONES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda x: (x + x).transpose(1, 2),
    "transposed twice": lambda x: ((x.sin()).transpose(1, 2), x.cos().permute(1, 2, 0)),
    "expanded": lambda x: (x + x).expand(-1, 3, -1)[:, :1],
    "a part of a result": lambda x: (x + x)[:, :, :1].transpose(0, 1),
    "summed": lambda x: x.mT.sum(1, keepdim=True),
    "and it as it is": lambda x: (lambda y: (y, y.transpose(1, 2)))(x + x),
    "positive": lambda x: x.new_ones(x.shape[0], 1, 4, 4).to(memory_format=torch.channels_last).relu(),
    "of two": lambda x: (lambda y: y + y.sin())(x.mT * 2),
    "with a gradient": lambda x: torch.autograd.grad((x * x).sum(), x)[0].transpose(0, 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ONES)
def test_dims_of_one_element_have_eagers_strides(name: str, dynamic: bool) -> None:
    compiled = torch.compile(ONES[name], backend="dynaxla", dynamic=dynamic)
    for rows in (2, 3):
        x = torch.randn(rows, 1, 5, requires_grad=name == "with a gradient")
        for actual, expected in zip(_all(compiled(x)), _all(ONES[name](x)), strict=True):
            assert (actual.shape, actual.stride()) == (expected.shape, expected.stride())
            assert_close(actual.detach(), expected.detach())


def _all(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
