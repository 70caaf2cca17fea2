"""Random numbers from a key; `dynaxla.custom_ops.threefry` defines the generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import random as random_rules
from dynaxla.custom_ops.threefry import MANTISSA_BITS, PARITY, RANDOM, ROTATIONS, ROUNDS, SECOND
from dynaxla.ops.promotion import JNP_DTYPES
from dynaxla.ops.record import OpFamily

OPS = OpFamily()

Words = tuple[jax.Array, jax.Array]  # uint32


@OPS.op(RANDOM, pad=random_rules.draw)
def random(
    key: jax.Array, size: Sequence[int], kind: str, dtype: torch.dtype, true_size: jax.Array | None = None
) -> jax.Array:
    low, high = _indices(tuple(size), true_size)
    first = threefry(key, low, high)
    if kind == "bits":
        return _long(first).astype(jnp.int64)
    if kind == "uniform":
        return _uniform(first, dtype)
    if dtype == torch.float64:
        turn = _uniform(threefry(key, low, high | np.uint32(SECOND)), dtype)
        return _radius(_uniform(first, dtype) + 2.0**-54) * jnp.cos(2 * math.pi * turn)
    half_turns = first[1].astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-31)
    radius = _radius((first[0].astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32))
    return (radius * _cosine(half_turns)).astype(JNP_DTYPES[dtype])  # type: ignore[no-any-return]


def threefry(key: jax.Array, low: jax.Array, high: jax.Array) -> Words:
    """Two uint32 words for each counter (low, high) by a key, int64 []. The rounds are unrolled, so that XLA fuses them."""
    lower, upper = _words(key)
    keys = (lower, upper, lower ^ upper ^ np.uint32(PARITY))
    x, y = low + keys[0], high + keys[1]
    for group in range(ROUNDS // 4):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(rotation) | y >> np.uint32(32 - rotation)) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _indices(size: tuple[int, ...], true_size: jax.Array | None) -> Words:
    """The elements' indices as two words; the upper words are zero for fewer than 2**32 elements."""
    count = math.prod(size)
    kind = jnp.uint32 if count <= 1 << 32 else jnp.uint64
    if true_size is None:
        index = lax.iota(kind, count).reshape(size)
    else:
        index = jnp.zeros(size, kind)
        for dim in range(len(size)):
            index += lax.broadcasted_iota(kind, size, dim) * jnp.prod(true_size[dim + 1 :]).astype(kind)
    return (index, jnp.zeros_like(index)) if kind == jnp.uint32 else _words(index)


def _words(value: jax.Array) -> Words:
    long = value.astype(jnp.uint64)
    return long.astype(jnp.uint32), (long >> np.uint64(32)).astype(jnp.uint32)


def _long(words: Words) -> jax.Array:
    return words[0].astype(jnp.uint64) << np.uint64(32) | words[1].astype(jnp.uint64)


def _uniform(words: Words, dtype: torch.dtype) -> jax.Array:
    bits = MANTISSA_BITS[dtype]
    whole = _long(words) >> np.uint64(64 - bits) if bits > 32 else words[0] >> np.uint32(32 - bits)
    wide = jnp.float64 if bits > 32 else jnp.float32
    return (whole.astype(wide) * wide(2.0**-bits)).astype(JNP_DTYPES[dtype])  # type: ignore[no-any-return]


def _radius(uniform: jax.Array) -> jax.Array:
    return jnp.sqrt(-2 * jnp.log(uniform))


def _cosine(half_turns: jax.Array) -> jax.Array:
    """The cosine of pi times a float32 in [-1, 1), to 1e-7, 20 times as fast as XLA's, which calls libm on the CPU."""
    angle = (np.float32(0.5) - jnp.abs(half_turns)) * np.float32(math.pi)  # the sine's argument, within half of pi
    square = angle * angle
    series = jnp.zeros_like(angle)
    for power in range(11, 0, -2):
        series = series * square + np.float32((-1) ** (power // 2) / math.factorial(power))
    return series * angle
