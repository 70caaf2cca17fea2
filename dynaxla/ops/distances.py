"""Distances between points, and their gradients."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import matmul as matmul_rules
from dynaxla.ops.dtypes import WIDE_FLOATS
from dynaxla.ops.eager_errors import check_one_dtype
from dynaxla.ops.linalg import product
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()


@OPS.op(aten._cdist_forward.default, check=check_one_dtype, dtypes=WIDE_FLOATS, pad=matmul_rules.cdist)
def cdist(x1: jax.Array, x2: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    many = max(x1.shape[-2], x2.shape[-2]) > matmul_rules.ROWS_FOR_PRODUCT
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        return _distances_from_product(x1, x2)
    return _distances(x1, x2, p)


def _distances_from_product(x1: jax.Array, x2: jax.Array) -> jax.Array:
    """Torch's formula, |x|^2 - 2 x.y + |y|^2 as one matrix product, with its loss of precision between near points."""
    squares1, squares2 = (x1 * x1).sum(-1, keepdims=True), (x2 * x2).sum(-1, keepdims=True)
    left = jnp.concatenate([-2 * x1, squares1, jnp.ones_like(squares1)], -1)
    right = jnp.concatenate([x2, jnp.ones_like(squares2), squares2], -1)
    return jnp.sqrt(jnp.maximum(product(left, jnp.matrix_transpose(right)), 0))


def _distances(x1: jax.Array, x2: jax.Array, p: float) -> jax.Array:
    add = jnp.maximum if math.isinf(p) else jnp.add

    def by_coordinate(x1: jax.Array, x2: jax.Array) -> jax.Array:
        # At once, XLA's CPU client would keep the gaps of all pairs and coordinates in memory.
        def step(total: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            left, right = given
            return add(total, _power(left[..., :, None] - right[..., None, :], p)), None

        shape = (*jnp.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], x2.shape[-2])
        return lax.scan(step, jnp.zeros(shape, x1.dtype), (jnp.moveaxis(x1, -1, 0), jnp.moveaxis(x2, -1, 0)))[0]

    def at_once(x1: jax.Array, x2: jax.Array) -> jax.Array:
        powers = _power(x1[..., :, None, :] - x2[..., None, :, :], p)
        return powers.max(-1, initial=0) if math.isinf(p) else powers.sum(-1)

    total: jax.Array = lax.platform_dependent(x1, x2, cpu=by_coordinate, default=at_once)
    if p in (0, 1) or math.isinf(p):
        return total
    return jnp.sqrt(total) if p == 2 else total ** (1 / p)


def _power(gaps: jax.Array, p: float) -> jax.Array:
    """What coordinates add to a p-norm's power, or of what it is the largest."""
    sizes = jnp.abs(gaps)
    if p == 0:
        return jnp.minimum(jnp.ceil(sizes), 1)
    if p == 1 or math.isinf(p):
        return sizes
    return sizes * sizes if p == 2 else sizes**p


def cdist_backward(grad: jax.Array, x1: jax.Array, x2: jax.Array, p: float, cdist: jax.Array) -> jax.Array:
    if grad.size == 0:
        return jnp.zeros_like(x1)  # not broadcast, as in torch

    def by_point(grad: jax.Array, x1: jax.Array, x2: jax.Array, cdist: jax.Array) -> jax.Array:
        def step(total: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            grads, point, distances = given
            slopes = _distance_derivative(x1 - point[..., None, :], distances[..., None], p)
            return total + grads[..., None] * slopes, None

        shape = (*jnp.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), *x1.shape[-2:])
        points = (jnp.moveaxis(grad, -1, 0), jnp.moveaxis(x2, -2, 0), jnp.moveaxis(cdist, -1, 0))
        return lax.scan(step, jnp.zeros(shape, x1.dtype), points)[0]

    def at_once(grad: jax.Array, x1: jax.Array, x2: jax.Array, cdist: jax.Array) -> jax.Array:
        gaps = x1[..., :, None, :] - x2[..., None, :, :]
        return (grad[..., None] * _distance_derivative(gaps, cdist[..., None], p)).sum(-2)

    gradient: jax.Array = lax.platform_dependent(grad, x1, x2, cdist, cpu=by_point, default=at_once)
    return gradient


OPS.op(aten._cdist_backward.default, dtypes=WIDE_FLOATS, pad=matmul_rules.cdist_backward)(cdist_backward)


def _distance_derivative(gaps: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """The derivative of a p-norm distance by each coordinate; 0 where torch defines it as 0."""
    if p == 0:
        return jnp.zeros_like(gaps)
    if p == 1:
        return jnp.sign(gaps)
    sizes = jnp.abs(gaps)
    if math.isinf(p):
        return jnp.sign(gaps) * (sizes == distance)
    flat = (distance == 0) | ((gaps == 0) & (p < 1))
    return jnp.where(flat, 0, jnp.sign(gaps) * sizes ** (p - 1) / distance ** (p - 1))


@OPS.op(aten._pdist_forward.default, dtypes=WIDE_FLOATS)
def pdist(self: jax.Array, p: float = 2.0) -> jax.Array:
    rows, columns = np.triu_indices(self.shape[0], 1)
    return _distances(self, self, p)[rows, columns]


@OPS.op(aten._pdist_backward.default, dtypes=WIDE_FLOATS)
def pdist_backward(grad: jax.Array, self: jax.Array, p: float, pdist: jax.Array) -> jax.Array:
    return cdist_backward(
        _symmetric_matrix(grad, self.shape[0]), self, self, p, _symmetric_matrix(pdist, self.shape[0])
    )


def _symmetric_matrix(pairs: jax.Array, n: int) -> jax.Array:
    """The symmetric matrix with a zero diagonal whose upper triangle is `pairs`."""
    rows, columns = np.triu_indices(n, 1)
    upper = jnp.zeros((n, n), pairs.dtype).at[rows, columns].set(pairs)
    return upper + upper.T
