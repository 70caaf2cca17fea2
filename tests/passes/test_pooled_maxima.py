"""Gradients of max pooling that find the maxima again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dynaxla.custom_ops.max_pool_gradient import MAX_POOL2D_GRADIENT, MAX_POOL3D_GRADIENT
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.pooling import _max_pooling_gradient, _places, _scatter_back, _select_and_scatter, _Windows, lowest_of
from dynaxla.passes.pooled_maxima import find_maxima_again
from tests.tolerances import assert_close

aten = torch.ops.aten
Pool = Callable[[Tensor], Tensor]
POOLS: dict[str, tuple[Pool, tuple[int, ...], Any]] = {
    "1d": (lambda x: F.max_pool1d(x, 3, 2, 1), (2, 3, 9), MAX_POOL2D_GRADIENT),
    "2d": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 9, 8), MAX_POOL2D_GRADIENT),
    "2d of equal steps": (lambda x: F.max_pool2d(x, 2), (3, 9, 8), MAX_POOL2D_GRADIENT),
    "2d with gaps": (lambda x: F.max_pool2d(x, 3, 1, 1, 2), (2, 3, 9, 8), MAX_POOL2D_GRADIENT),
    "2d with a last part": (lambda x: F.max_pool2d(x, 3, 2, 1, 1, True), (2, 3, 9, 8), MAX_POOL2D_GRADIENT),
    "3d": (lambda x: F.max_pool3d(x, 2, 2, 1), (2, 3, 5, 6, 7), MAX_POOL3D_GRADIENT),
}


def gradient(pool: Pool, x: Tensor) -> Tensor:
    return torch.autograd.grad(pool(x).sin().sum(), x)[0]


@pytest.mark.parametrize("name", POOLS)
def test_indices_are_read_by_nothing(name: str) -> None:
    pool, sizes, op = POOLS[name]
    x = torch.randn(sizes, requires_grad=True)
    made = make_fx(functools.partial(gradient, pool))(x)
    find_maxima_again(made.graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    (found,) = made.graph.find_nodes(op="call_function", target=op)
    assert found.meta["val"].shape == found.args[1].meta["val"].shape
    assert not any(node.args[1] for node in made.graph.nodes if node.name.startswith("getitem"))
    assert_close(made(x), gradient(pool, x))


def test_indices_that_something_reads_stay() -> None:
    def pool(x: Tensor) -> Tensor:
        y, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y.sin(), indices, 2)

    made = make_fx(functools.partial(gradient, pool))(torch.randn(1, 2, 6, 6, requires_grad=True))
    find_maxima_again(made.graph)
    assert made.graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default)


def test_indices_of_another_pooling_stay() -> None:
    def mixed(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        indices = aten.max_pool2d_with_indices.default(x, [2, 2])[1]
        return aten.max_pool2d_with_indices_backward.default(grad, y, [2, 2], [], [0, 0], [1, 1], False, indices)

    made = make_fx(mixed)(torch.randn(1, 2, 3, 3), torch.randn(1, 2, 6, 6), torch.randn(1, 2, 6, 6))
    find_maxima_again(made.graph)
    assert not made.graph.find_nodes(op="call_function", target=MAX_POOL2D_GRADIENT)


def of_equal_and_unordered_values(sizes: tuple[int, ...]) -> Tensor:
    x = torch.randint(-2, 3, sizes).float()
    x.view(-1)[::7] = torch.nan
    x.view(-1)[:40] = -torch.inf
    return x


@pytest.mark.parametrize("name", POOLS)
def test_a_training_step_keeps_no_indices(name: str, recorder: Recorder) -> None:
    pool, sizes, _ = POOLS[name]
    compiled = torch.compile(pool, backend="dynaxla", dynamic=False)
    for x in (torch.randn(sizes), of_equal_and_unordered_values(sizes)):
        ours, eager = (x.clone().requires_grad_() for _ in range(2))
        with recorder.expect(eager_ops=0):
            result, expected = compiled(ours), pool(eager)
        weights = torch.randn_like(expected)
        (result * weights).sum().backward()
        (expected * weights).sum().backward()
        assert_close(result, expected)
        assert_close(ours.grad, eager.grad)


@pytest.mark.parametrize("sizes", [(2, 3, 8, 9), (1, 1, 5, 5)])
def test_xlas_own_op_chooses_as_torch_does(sizes: tuple[int, ...]) -> None:
    x = of_equal_and_unordered_values(sizes).numpy() if sizes[0] > 1 else np.full(sizes, -np.inf, np.float32)
    windows = _Windows.of(sizes[2:], [3, 2], [2, 1], [0, 0], [1, 1], False)
    grad = np.random.default_rng(0).standard_normal((*sizes[:2], *windows.outputs)).astype(np.float32)
    with jax.enable_x64(True):
        chosen = jax.jit(functools.partial(_select_and_scatter, windows=windows))(grad, x)
        added = _scatter_back(jnp.asarray(grad), jnp.asarray(x), _places(jnp.asarray(x), windows, lowest_of(x)), 2)
    np.testing.assert_allclose(chosen, added, rtol=1e-6)


def test_a_tpu_is_given_xlas_own_op() -> None:
    settings = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    x, grad = (jax.ShapeDtypeStruct((2, 3, size, size), jnp.bfloat16) for size in (8, 4))
    function = jax.jit(lambda grad, x: _max_pooling_gradient(2)(grad, x, *settings))
    texts = [jax.export.export(function, platforms=[name])(grad, x).mlir_module() for name in ("tpu", "cpu")]
    assert ["select_and_scatter" in text for text in texts] == [True, False]
    assert [' "stablehlo.scatter"(' in text for text in texts] == [False, True]
