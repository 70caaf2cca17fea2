"""Window functions of signal processing.

Those of usual lengths are constants: XLA computes a cosine that a product with many frames reads again for each frame.
"""

from __future__ import annotations

import math
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dynaxla.ops.creation import fill_tensor
from dynaxla.ops.promotion import cast
from dynaxla.ops.record import OpFamily

Positions = np.ndarray | jax.Array
aten = torch.ops.aten
OPS = OpFamily()
_LONGEST_CONSTANT = 1 << 16


def _window(values: Positions, length: int, dtype: torch.dtype | None) -> jax.Array:
    chosen = dtype or torch.get_default_dtype()
    return fill_tensor((length,), 1, chosen) if length <= 1 else cast(jnp.asarray(values), chosen)


def _functions(length: int) -> ModuleType:
    """NumPy, which computes a constant, or JAX's, which does so when the program runs."""
    return np if length <= _LONGEST_CONSTANT else jnp


def _window_positions(length: int, periodic: bool) -> Positions:
    """float64 positions from 0; 1 is after the last sample of a periodic window, or at that of a symmetric one."""
    steps: Positions = _functions(length).arange(length, dtype=np.float64)
    return steps / max(length if periodic else length - 1, 1)


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
    values = alpha - beta * _functions(window_length).cos(2 * math.pi * _window_positions(window_length, periodic))
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
    angle, cos = 2 * math.pi * _window_positions(window_length, periodic), _functions(window_length).cos
    return _window(0.42 - 0.5 * cos(angle) + 0.08 * cos(2 * angle), window_length, dtype)


@OPS.op(aten.bartlett_window.default, aten.bartlett_window.periodic)
def bartlett_window(
    window_length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    slope = _functions(window_length).abs(2 * _window_positions(window_length, periodic) - 1)
    return _window(1 - slope, window_length, dtype)


@OPS.op(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta)
def kaiser_window(
    window_length: int,
    periodic: bool = True,
    beta: float = 12.0,
    *,
    dtype: torch.dtype | None = None,
    **_: object,
) -> jax.Array:
    functions = _functions(window_length)
    side = functions.maximum(1 - (2 * _window_positions(window_length, periodic) - 1) ** 2, 0)
    return _window(functions.i0(beta * functions.sqrt(side)) / functions.i0(beta), window_length, dtype)
