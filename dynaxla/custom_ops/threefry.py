"""The package's own random numbers: a seed drawn from torch's generator once per call, and pure functions of it.

Element i of a draw is a word of Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", 2011): its key is the draw's, its counter is i, the row-major index in a tensor of the true sizes. So an element
does not depend on the bucket that its tensor is padded to, on other draws, or on whether XLA or torch computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["bits", "uniform", "normal"]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
ROUNDS = 20
PARITY = 0x1BD11BDA
SECOND = 1 << 31  # set in the counter's upper word for the second pair of words of an element
MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Number of random bits in a uniform number, as in torch: the most that keep it below 1."""

_WORD = 0xFFFFFFFF
_SEEDED = (torch.Tag.nondeterministic_seeded,)


def new_seed(device: torch.device) -> Tensor:
    """Draws a seed, int64 [], from a device's default generator, which advances by one number."""
    draw: Callable[[], Tensor] | None = getattr(getattr(torch, device.type, None), "draw_seed", None)
    if draw is not None:  # of this package's device, whose generator is on the CPU
        return draw()
    return torch.empty((), dtype=torch.int64, device=device).random_()


_draw_seed = torch.library.custom_op("dynaxla::draw_seed", new_seed, mutates_args=(), tags=_SEEDED)


@_draw_seed.register_fake
def _(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.custom_op("dynaxla::random", mutates_args=())
def random(key: Tensor, size: Sequence[int], kind: str, dtype: torch.dtype, true_size: Tensor | None = None) -> Tensor:
    """Draws independent numbers; equal keys give equal numbers.

    Args:
        key: the draw's key, int64 [].
        size: sizes of the result, with fewer than 2**63 elements.
        kind: "bits" are uniform in int64; "uniform" numbers in [0, 1), multiples of 2**-24 for float32; "normal" ones have
            mean 0 and variance 1, by Box and Muller.
        dtype: dtype of the result.
        true_size: int64 [len(size)], if the tensor is padded: elements within it are numbered as in a tensor of this size;
            elements outside are undefined.
    """
    assert kind in get_args(Kind), kind
    index = _indices(size, size if true_size is None else true_size.tolist(), key.device)
    first = _threefry(key, index & _WORD, index >> 32)
    if kind == "bits":
        return first[0] << 32 | first[1]
    if kind == "uniform":
        return _uniform(*first, dtype)
    return _normal(key, index, first, dtype)


@random.register_fake
def _(key: Tensor, size: Sequence[int], kind: str, dtype: torch.dtype, true_size: Tensor | None = None) -> Tensor:
    return torch.empty(size, dtype=dtype, device=key.device)


def _indices(size: Sequence[int], true_size: Sequence[int], device: torch.device) -> Tensor:
    index = torch.zeros(size, dtype=torch.int64, device=device)
    for dim, length in enumerate(size):
        shape = [1] * len(size)
        shape[dim] = length
        index += (torch.arange(length, device=device) * math.prod(true_size[dim + 1 :])).view(shape)
    return index


def _threefry(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two words of 32 bits, in int64, for each counter (low, high)."""
    lower, upper = key & _WORD, key >> 32 & _WORD
    keys = (lower, upper, lower ^ upper ^ PARITY)
    x, y = low + keys[0] & _WORD, high + keys[1] & _WORD
    for group in range(ROUNDS // 4):
        for rotation in ROTATIONS[group % 2]:
            x = x + y & _WORD
            y = (y << rotation | y >> 32 - rotation) & _WORD ^ x
        x = x + keys[(group + 1) % 3] & _WORD
        y = y + keys[(group + 2) % 3] + group + 1 & _WORD
    return x, y


def _uniform(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    bits = MANTISSA_BITS[dtype]
    words = x << 21 | y >> 11 if bits > 32 else x >> 32 - bits
    return (words.to(torch.float64) * 2.0**-bits).to(dtype)


def _normal(key: Tensor, index: Tensor, first: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Computes the radius from one word, never zero, and the angle from another; in float64 each from two words."""
    if dtype == torch.float64:
        second = _threefry(key, index & _WORD, index >> 32 | SECOND)
        radius, turn = _uniform(*first, dtype) + 2.0**-54, _uniform(*second, dtype)
    else:
        radius, turn = (word.to(torch.float32) for word in first)
        radius, turn = (radius + 0.5) * 2.0**-32, turn * 2.0**-32
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(turn * (2 * math.pi))).to(dtype)


DRAW_SEED = torch.ops.dynaxla.draw_seed.default
RANDOM = torch.ops.dynaxla.random.default
