"""Fourier transforms.

Arguments are the axes and torch's number of the normalization: 0 none, 1 divides by the root of the number of points, 2
by that number. In a transform between real and complex values the last of the axes is stored by half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import spectral as spectral_rules
from dynaxla.ops.promotion import JNP_DTYPES, cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()

_AXES_AT_ONCE = 3  # the most axes of one StableHLO fft


@OPS.op(aten._fft_c2c.default, pad=spectral_rules.fft)
def fft_c2c(self: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    return _scale(_transform(self, dim, forward), _points(self.shape, dim), normalization)


@OPS.op(aten._fft_r2c.default, pad=spectral_rules.rfft)
def fft_r2c(self: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    points = _points(self.shape, dim)
    if not onesided:
        return _scale(_transform(cast(self, torch_dtype(self).to_complex()), dim, True), points, normalization)
    *others, last = dim
    half = _along(self, last, lax.FftType.RFFT, self.shape[last])
    return _scale(_transform(half, others, True), points, normalization)


@OPS.op(aten._fft_c2r.default, pad=spectral_rules.irfft)
def fft_c2r(self: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    *others, last = dim
    points = _points(self.shape, others) * last_dim_size
    half = lax.slice_in_dim(_transform(self, others, False), 0, last_dim_size // 2 + 1, axis=last % self.ndim)
    # XLA's inverse divides by the length; torch's does not.
    whole = _along(half, last, lax.FftType.IRFFT, last_dim_size) * last_dim_size
    return _scale(whole, points, normalization)


@OPS.op(aten.fft_fftfreq.default)
def fftfreq(n: int, d: float = 1.0, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    places = jnp.concatenate([jnp.arange((n + 1) // 2), jnp.arange(-(n // 2), 0)])
    return _frequencies(places, n, d, dtype)


@OPS.op(aten.fft_rfftfreq.default)
def rfftfreq(n: int, d: float = 1.0, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return _frequencies(jnp.arange(n // 2 + 1), n, d, dtype)


def _frequencies(places: jax.Array, n: int, d: float, dtype: torch.dtype | None) -> jax.Array:
    result = dtype or torch.get_default_dtype()
    wide = opmath_dtype(result)
    step = jnp.asarray(math.inf if n * d == 0 else 1.0 / (n * d), JNP_DTYPES[wide])
    return cast(cast(places, wide) * step, result)


def _points(shape: Sequence[int], dim: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in dim)


def _scale(x: jax.Array, points: int, normalization: int) -> jax.Array:
    if normalization == 0:
        return x
    factor = 1.0 / (math.sqrt(points) if normalization == 1 else points)
    return x * jnp.asarray(factor, x.real.dtype)


def _transform(x: jax.Array, dim: Sequence[int], forward: bool) -> jax.Array:
    """The complex-to-complex transform along `dim`, not scaled."""
    kind = lax.FftType.FFT if forward else lax.FftType.IFFT
    for first in range(0, len(dim), _AXES_AT_ONCE):
        axes = dim[first : first + _AXES_AT_ONCE]
        places = range(-len(axes), 0)
        lengths = tuple(x.shape[axis] for axis in axes)
        x = jnp.moveaxis(lax.fft(jnp.moveaxis(x, axes, places), kind, lengths), places, axes)
    return x if forward else x * jnp.asarray(_points(x.shape, dim), x.real.dtype)


def _along(x: jax.Array, axis: int, kind: lax.FftType, length: int) -> jax.Array:
    return jnp.moveaxis(lax.fft(jnp.moveaxis(x, axis, -1), kind, (length,)), -1, axis)
