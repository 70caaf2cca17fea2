"""Window functions of signal processing."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.ops.creation import fill_tensor
from dynaxla.ops.promotion import cast
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()


def _window(values: jax.Array, length: int, dtype: torch.dtype | None) -> jax.Array:
    chosen = dtype or torch.get_default_dtype()
    return fill_tensor((length,), 1, chosen) if length <= 1 else cast(values, chosen)


def _window_positions(length: int, periodic: bool) -> jax.Array:
    """float64 positions from 0; 1 is after the last sample of a periodic window, or at that of a symmetric one."""
    return lax.iota(jnp.float64, length) / max(length if periodic else length - 1, 1)


@OPS.op(
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
)
def hamming_window(
    window_length: int,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    *,
    dtype: torch.dtype | None = None,
    **_: object,
) -> jax.Array:
    values = alpha - beta * jnp.cos(2 * math.pi * _window_positions(window_length, periodic))
    return _window(values, window_length, dtype)


@OPS.op(aten.hann_window.default, aten.hann_window.periodic)
def hann_window(
    window_length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return hamming_window(window_length, periodic, 0.5, 0.5, dtype=dtype)


@OPS.op(aten.blackman_window.default, aten.blackman_window.periodic)
def blackman_window(
    window_length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    angle = 2 * math.pi * _window_positions(window_length, periodic)
    return _window(0.42 - 0.5 * jnp.cos(angle) + 0.08 * jnp.cos(2 * angle), window_length, dtype)


@OPS.op(aten.bartlett_window.default, aten.bartlett_window.periodic)
def bartlett_window(
    window_length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return _window(1 - jnp.abs(2 * _window_positions(window_length, periodic) - 1), window_length, dtype)


@OPS.op(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta)
def kaiser_window(
    window_length: int,
    periodic: bool = True,
    beta: float = 12.0,
    *,
    dtype: torch.dtype | None = None,
    **_: object,
) -> jax.Array:
    side = jnp.maximum(1 - (2 * _window_positions(window_length, periodic) - 1) ** 2, 0)
    return _window(jnp.i0(beta * jnp.sqrt(side)) / jnp.i0(beta), window_length, dtype)
