"""Training between convolutions has channels last, with the same numbers and strides as eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.passes.channels_last_convolution import rewrite_convolutions
from dynaxla.passes.channels_last_values import PASS, keep_channels_last
from dynaxla.targets.registry import find_target
from tests.tolerances import assert_close
from tests.training.images import check_step

aten = torch.ops.aten


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_step_is_as_in_eager(memory_format: torch.memory_format) -> None:
    check_step("cpu", memory_format)


def trace(function: Callable[..., object], *given: Tensor) -> GraphModule:
    made = make_fx(function, tracing_mode="fake")(*given)
    rewrite_convolutions(made.graph)
    keep_channels_last(made.graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def list_shapes(made: GraphModule, *targets: object) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in made.graph.nodes if node.target in targets]


def test_elementwise_ops_have_channels_last() -> None:
    def model(x: Tensor, weight: Tensor, gain: Tensor, other: Tensor) -> Tensor:
        y = torch.relu(nn.functional.conv2d(x, weight) * gain + other)
        return torch.where(y > 1, y, 0.5 * y).sum((0, 2, 3))

    given = torch.randn(2, 3, 6, 5), torch.randn(7, 3, 2, 2), torch.randn(7, 1, 1), torch.randn(2, 1, 5, 4)
    made = trace(model, *given)
    ops = (aten.relu.default, aten.mul.Tensor, aten.add.Tensor, aten.where.self, aten.gt.Scalar)
    assert set(list_shapes(made, *ops)) == {(2, 5, 4, 7)}
    assert_close(made(*given), model(*given))


def test_what_is_not_an_image_stays() -> None:
    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.conv2d(x, weight)
        return y.sum(3), y.sum((0, 1, 2, 3)), y.flatten(1) * 2, y.cumsum(1), torch.rand_like(y)

    given = torch.randn(2, 3, 6, 5), torch.randn(7, 3, 2, 2)
    made = trace(model, *given)
    assert (2, 7, 5) in list_shapes(made, aten.sum.dim_IntList)
    for found, expected in zip(made(*given)[:4], model(*given)[:4], strict=True):
        assert_close(found, expected)


def test_it_pays_on_the_cpu() -> None:
    assert PASS.pays_on is not None
    assert [PASS.pays_on(find_target(name)) for name in ("tpu", "cpu")] == [False, True]
