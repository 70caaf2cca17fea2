"""Loss functions that are not decomposed, and their gradients.

`reduction` is torch's number: 0 none, 1 mean, 2 sum. float16 and bfloat16 are computed in float32 and rounded once at
the end.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import gradients as gradients_rules
from dynaxla.bucketing.pad_rules import losses as losses_rules
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.axes_and_dtypes import widen
from dynaxla.ops.dtypes import FLOATS, INEXACT, REAL
from dynaxla.ops.eager_errors import check_labels, check_number, check_one_dtype
from dynaxla.ops.promotion import compute
from dynaxla.ops.record import OpFamily
from dynaxla.ops.transcendental import log1p, softplus

aten = torch.ops.aten
OPS = OpFamily()

NONE, MEAN, SUM = 0, 1, 2


def apply_reduction(terms: jax.Array, reduction: int, dtype: jnp.dtype) -> jax.Array:
    """Applies the reduction and casts to `dtype`; the mean of no terms is NaN."""
    if reduction == NONE:
        return terms.astype(dtype)
    total = jnp.sum(terms)
    return (total / terms.size if reduction == MEAN else total).astype(dtype)


def broadcast_gradient(grad: jax.Array, terms: int, reduction: int) -> jax.Array:
    """The gradient of each of the `terms` elements under the reduction."""
    return widen(grad) / terms if reduction == MEAN else widen(grad)


def _class_axis(x: jax.Array) -> int:
    """The class axis: 1 of (N, C) and (N, C, H, W), 0 of (C,)."""
    return min(1, x.ndim - 1)


def _class_mask(x: jax.Array, target: jax.Array, ignore_index: int) -> jax.Array:
    """Bool of the shape of `x`: True at each target's class; ignored targets have none."""
    axis = _class_axis(x)
    wanted = jnp.expand_dims(target.reshape(x.shape[:axis] + x.shape[axis + 1 :]), axis)
    classes = lax.broadcasted_iota(wanted.dtype, x.shape, axis)
    return (classes == wanted) & (wanted != ignore_index)


def _pick_losses(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """The loss of each target, and its weight; both are 0 where it is ignored."""
    axis = _class_axis(x)
    wanted = jnp.expand_dims(target.reshape(x.shape[:axis] + x.shape[axis + 1 :]), axis).astype(jnp.int64)
    counts = (wanted >= 0) & (wanted < x.shape[axis]) & (wanted != ignore_index)
    places = jnp.where(counts, wanted, 0)
    weights = jnp.ones(places.shape, widen(x).dtype) if weight is None else widen(weight)[places]
    weights = jnp.where(counts, weights, 0)
    picked = jnp.take_along_axis(x, places, axis, mode="promise_in_bounds")
    losses = jnp.where(counts, -widen(picked) * weights, 0)
    return lax.squeeze(losses, (axis,)), lax.squeeze(weights, (axis,))


def _class_weights(x: jax.Array, weight: jax.Array | None) -> jax.Array:
    if weight is None:
        return jnp.ones((1,) * x.ndim, widen(x).dtype)
    axis = _class_axis(x)
    return widen(weight).reshape((1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1))


@OPS.op(
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    check=check_labels,
    pad=losses_rules.nll_loss,
    limits="a class out of range counts as ignored where values are not checked",
)
def nll_loss(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """The loss and the total weight (0 without a reduction); a target out of range counts as ignored."""

    def by_mask(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        axis, picked = _class_axis(x), _class_mask(x, target, ignore_index)
        weights = jnp.where(picked, _class_weights(x, weight), 0)
        return jnp.sum(jnp.where(picked, -widen(x) * weights, 0), axis), jnp.sum(weights, axis)

    def by_place(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _pick_losses(x, target, weight, ignore_index)

    # Other compilers fuse the mask with what makes x; XLA's CPU compiler would read all of x once more.
    losses, weights = lax.platform_dependent(x, cpu=by_place, default=by_mask) if x.size else by_mask(x)
    if reduction == NONE and x.ndim > 1:
        return losses.astype(x.dtype), jnp.zeros((), x.dtype)
    total, total_weight = jnp.sum(losses), jnp.sum(weights)
    loss = total / total_weight if reduction == MEAN else total
    return loss.astype(x.dtype), total_weight.astype(x.dtype)


@OPS.op(
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
    pad=gradients_rules.nll_loss_backward,
    limits="a class out of range counts as ignored where values are not checked",
)
def nll_loss_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    flow = widen(grad)
    if reduction == MEAN:
        flow = flow / widen(total_weight)
    elif reduction == NONE and x.ndim > 1:
        flow = jnp.expand_dims(flow, _class_axis(x))
    picked = _class_mask(x, target, ignore_index)
    return jnp.where(picked, -flow * _class_weights(x, weight), 0).astype(x.dtype)


@OPS.op(
    aten.binary_cross_entropy.default,
    check=check_one_dtype,
    dtypes=FLOATS,
    pad=losses_rules.loss,
    limits="input outside 0 to 1 is not detected where values are not checked",
    as_aten=decompose,
)
def binary_cross_entropy(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = MEAN
) -> jax.Array:
    """Logarithms are clamped at -100, as in torch; torch raises for `x` outside 0 to 1."""
    p, y = widen(x), widen(target)
    terms = (y - 1) * jnp.maximum(log1p(-p), -100) - y * jnp.maximum(jnp.log(p), -100)
    return apply_reduction(terms if weight is None else terms * widen(weight), reduction, x.dtype)


@OPS.op(
    aten.binary_cross_entropy_backward.default,
    check=check_one_dtype,
    dtypes=FLOATS,
    pad=gradients_rules.loss_backward,
)
def binary_cross_entropy_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = MEAN
) -> jax.Array:
    p, y = widen(x), widen(target)
    slope = (p - y) / jnp.maximum((1 - p) * p, 1e-12)
    flow = broadcast_gradient(grad, x.size, reduction) * slope
    return (flow if weight is None else flow * widen(weight)).astype(x.dtype)


@OPS.op(aten.binary_cross_entropy_with_logits.default, dtypes=REAL, pad=losses_rules.loss, as_aten=decompose)
def binary_cross_entropy_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    z, y = widen(x), widen(target)
    slope = 1 if pos_weight is None else (widen(pos_weight) - 1) * y + 1
    terms = (1 - y) * z + slope * softplus(-z)
    return apply_reduction(terms if weight is None else terms * widen(weight), reduction, x.dtype)


@OPS.op(aten.mse_loss.default, dtypes=REAL, pad=losses_rules.loss, as_aten=decompose)
def mse_loss(x: jax.Array, target: jax.Array, reduction: int = MEAN) -> jax.Array:
    squares = compute(lambda a, b: (a - b) ** 2, x, target)
    return apply_reduction(widen(squares), reduction, squares.dtype)


@OPS.op(
    aten.mse_loss_backward.default,
    check=check_one_dtype,
    dtypes=REAL,
    pad=gradients_rules.loss_backward,
    as_aten=decompose,
)
def mse_loss_backward(grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int) -> jax.Array:
    count = max(math.prod(jnp.broadcast_shapes(x.shape, target.shape)), 1)
    return compute(lambda g, a, b: 2 * broadcast_gradient(g, count, reduction) * (a - b), grad, x, target)


@OPS.op(
    aten.smooth_l1_loss.default,
    check=check_number("beta", lambda beta: beta >= 0),
    dtypes=FLOATS,
    pad=losses_rules.loss,
    as_aten=decompose,
)
def smooth_l1_loss(x: jax.Array, target: jax.Array, reduction: int = MEAN, beta: float = 1.0) -> jax.Array:
    def term(a: jax.Array, b: jax.Array) -> jax.Array:
        z = jnp.abs(a - b)
        return jnp.where(z < beta, 0.5 * z * z / beta if beta else z, z - 0.5 * beta)

    terms = compute(term, x, target)
    return apply_reduction(widen(terms), reduction, terms.dtype)


@OPS.op(aten.smooth_l1_loss_backward.default, check=check_one_dtype, dtypes=FLOATS, pad=gradients_rules.loss_backward)
def smooth_l1_loss_backward(grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, beta: float) -> jax.Array:
    def slope(g: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        z = a - b
        side = jnp.where(jnp.abs(z) < beta, z / beta if beta else z, jnp.sign(z))
        return broadcast_gradient(g, z.size, reduction) * side

    return compute(slope, grad, x, target)


@OPS.op(aten.huber_loss.default, check=check_one_dtype, dtypes=FLOATS, pad=losses_rules.loss, as_aten=decompose)
def huber_loss(x: jax.Array, target: jax.Array, reduction: int = MEAN, delta: float = 1.0) -> jax.Array:
    def term(a: jax.Array, b: jax.Array) -> jax.Array:
        z = jnp.abs(a - b)
        return jnp.where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta))

    terms = compute(term, x, target)
    return apply_reduction(widen(terms), reduction, terms.dtype)


@OPS.op(
    aten.huber_loss_backward.default,
    check=check_one_dtype,
    dtypes=FLOATS,
    pad=gradients_rules.loss_backward,
    as_aten=decompose,
)
def huber_loss_backward(grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, delta: float) -> jax.Array:
    def slope(g: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        z = a - b
        side = jnp.where(z <= -delta, -delta, jnp.where(z >= delta, delta, z))
        return broadcast_gradient(g, z.size, reduction) * side

    return compute(slope, grad, x, target)


@OPS.op(aten.soft_margin_loss.default, check=check_one_dtype, dtypes=INEXACT, pad=losses_rules.loss, as_aten=decompose)
def soft_margin_loss(x: jax.Array, target: jax.Array, reduction: int = MEAN) -> jax.Array:
    terms = compute(lambda a, b: log1p(jnp.exp(-b * a)), x, target)
    return apply_reduction(widen(terms), reduction, terms.dtype)


@OPS.op(
    aten.soft_margin_loss_backward.default,
    check=check_one_dtype,
    dtypes=INEXACT,
    pad=gradients_rules.loss_backward,
    as_aten=decompose,
)
def soft_margin_loss_backward(grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int) -> jax.Array:
    def slope(g: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return -b * broadcast_gradient(g, x.size, reduction) * jax.nn.sigmoid(-b * a)

    return compute(slope, grad, x, target)
