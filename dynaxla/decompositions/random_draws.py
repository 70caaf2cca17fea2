"""Rewrites random ops to functions of a seed while AOTAutograd traces; each call of a graph draws one seed.

Each draw of a graph has its own number; seed plus number is the draw's key. Values of the forward that the backward
recomputes, as in gradient checkpointing, use the forward's seed. Not rewritten are draws from a generator that the user
passes, distributions without a rewrite here, and calls for which torch raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NotImplementedType
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.types import IntLikeType, Number

from dynaxla.custom_ops.threefry import DRAW_SEED, MANTISSA_BITS, RANDOM, Kind
from dynaxla.diagnostics import EagerRefusal
from dynaxla.torch_api.decompositions import suggest_memory_format
from dynaxla.torch_api.generators import take_traced_shard
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten

NO_CHOICE = -(2**63)
"""Unchecked result of multinomial for weights for which eager raises: negative, not finite, or all zero."""

Size = Sequence[IntLikeType]
Drawn = Tensor | NotImplementedType
LEFT_TO_TORCH: Drawn = NotImplemented
"""Returned by a rewrite if torch has to draw, or to raise."""

Rewrite = Callable[..., Drawn | tuple[Tensor, Tensor]]


class TensorOptions(TypedDict, total=False):
    """Options of the tensor to create, as torch passes them; None or missing options have torch's defaults."""

    dtype: torch.dtype | None
    device: torch.device | None


_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_MAX_RANGE_OF_32_BITS = 1 << 31  # ranges of up to this many integers use 32 random bits, larger ones 63


def random_decompositions() -> Mapping[OpOverload, Rewrite]:
    """Returns the rewrites, by op. All draws traced with one of these mappings have different numbers."""
    draws = Draws(itertools.count())
    found: dict[OpOverload, Rewrite] = {
        aten.rand.default: draws.uniform,
        aten.randn.default: draws.normal,
        aten.randint.default: lambda high, size, **options: draws.integers(size, 0, high, **options),
        aten.randint.low: lambda low, high, size, **options: draws.integers(size, low, high, **options),
        aten.rand_like.default: lambda x, **options: _like(x, draws.uniform, **options),
        aten.randn_like.default: lambda x, **options: _like(x, draws.normal, **options),
        aten.randint_like.default: lambda x, high, **options: _like(x, draws.integers, 0, high, **options),
        aten.randint_like.low_dtype: lambda x, low, high, **options: _like(x, draws.integers, low, high, **options),
        aten.randperm.default: draws.permutation,
        aten.bernoulli.default: lambda x: draws.bernoulli(x, x),
        aten.bernoulli.p: draws.bernoulli,
        aten.bernoulli.Tensor: draws.bernoulli,
        aten.native_dropout.default: draws.dropout,
        aten.uniform.default: draws.uniform_between,
        aten.normal_functional.default: lambda x, mean=0.0, std=1.0: draws.normal_of(mean, std, x),
        aten.normal.float_float: lambda mean, std, size, **options: draws.scale_draws(
            draws.normal(size, **options), mean, std
        ),
        aten.normal.Tensor_float: draws.normal_around,
        aten.normal.float_Tensor: draws.normal_around,
        aten.normal.Tensor_Tensor: draws.normal_around,
        aten.exponential.default: draws.exponential,
        aten.geometric.default: draws.geometric,
        aten.cauchy.default: draws.cauchy,
        aten.log_normal.default: draws.log_normal,
        aten.random.default: draws.random_integers,
        aten.random.to: lambda x, to: draws.random_integers(x, 0, to),
        getattr(aten.random, "from"): draws.random_integers,
        aten.multinomial.default: draws.choices,
        aten.rrelu_with_noise_functional.default: draws.leaky,
    }
    return {op: _from_default_generator(rewrite) for op, rewrite in found.items()}


class Draws:
    """Random draws, each with its own number."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers

    def uniform(self, size: Size, **options: Unpack[TensorOptions]) -> Drawn:
        return self._real(size, "uniform", 1.0, **options)

    def normal(self, size: Size, **options: Unpack[TensorOptions]) -> Drawn:
        return self._real(size, "normal", 0.5**0.5, **options)

    def integers(self, size: Size, low: IntLikeType, high: IntLikeType, **options: Unpack[TensorOptions]) -> Drawn:
        """Draws integers from low to high - 1. Ranges of up to 2**31 use 32 random bits, as uniformly as torch."""
        dtype, device = _dtype_and_device(options, torch.int64)
        count = high - low
        if isinstance(count, int) and not 0 < count < 2**63:
            return LEFT_TO_TORCH
        if not all(_is_in_range(dtype, end) for end in (low, high - 1)):
            return LEFT_TO_TORCH
        bits = self._draw(size, "bits", torch.int64, device)
        if isinstance(count, int) and count <= _MAX_RANGE_OF_32_BITS:
            chosen = ((bits & 0xFFFFFFFF) * count) >> 32
        else:
            chosen = (bits & 2**63 - 1) % count  # type: ignore[operator]
        return (chosen + low).to(dtype)  # type: ignore[union-attr]

    def random_integers(self, x: Tensor, low: int = 0, high: int | None = None) -> Drawn:
        """Computes `random_`: without `high`, integers from 0 to the largest below which the dtype represents every integer."""
        if high is None:
            high = _largest_whole(x.dtype) + 1
        return self.integers(x.shape, low, high, **_options_of(x))

    def permutation(self, n: IntLikeType, **options: Unpack[TensorOptions]) -> Drawn:
        """Returns the permutation that sorts random 64-bit words, which are almost surely distinct."""
        dtype, device = _dtype_and_device(options, torch.int64)
        if isinstance(n, int) and n > _largest_whole(dtype):
            return LEFT_TO_TORCH
        return torch.argsort(self._draw([n], "bits", torch.int64, device)).to(dtype)

    def bernoulli(self, x: Tensor, p: Tensor | Number = 0.5) -> Drawn:
        """Draws ones with probability p. Eager raises for p outside of [0, 1]; unchecked, a tensor p gives NaN there."""
        if not isinstance(p, Tensor):
            return self._below(x, p).to(x.dtype) if isinstance(p, (int, float)) and 0 <= p <= 1 else LEFT_TO_TORCH
        if p.dtype not in MANTISSA_BITS:
            return LEFT_TO_TORCH
        drawn = self._below(x, p).to(x.dtype)
        return torch.where((p >= 0) & (p <= 1), drawn, math.nan) if x.dtype.is_floating_point else drawn

    def dropout(self, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor] | Drawn:
        if x.dtype not in MANTISSA_BITS or not 0 <= p <= 1:
            return LEFT_TO_TORCH
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if p == 1:
            return x * 0, torch.zeros_like(x, dtype=torch.bool)
        kept = self._below(x, 1 - p)
        return x * kept * (1 / (1 - p)), kept

    def uniform_between(self, x: Tensor, low: float = 0.0, high: float = 1.0) -> Drawn:
        if low > high or high - low > torch.finfo(x.dtype).max:  # eager raises
            return LEFT_TO_TORCH
        drawn = self.uniform(x.shape, **_options_of(x))
        return drawn if drawn is LEFT_TO_TORCH else drawn * (high - low) + low  # type: ignore[return-value]

    def normal_of(self, mean: Tensor | float, std: Tensor | float, like: Tensor) -> Drawn:
        return self.scale_draws(self.normal(like.shape, **_options_of(like)), mean, std)

    def normal_around(self, mean: Tensor | float, std: Tensor | float = 1.0) -> Drawn:
        """Draws with a tensor of means, of deviations, or both, in the dtype of the first.

        Raises:
            EagerRefusal: that is of whole numbers, or deviations are complex.
        """
        tensors = torch.broadcast_tensors(*(each for each in (mean, std) if isinstance(each, Tensor)))
        dtype = tensors[0].dtype
        is_complex = isinstance(std, Tensor) and std.is_complex()
        if is_complex or not (dtype.is_floating_point or dtype.is_complex):
            raise EagerRefusal(f"normal numbers of {dtype}, with deviations of {tensors[-1].dtype}")
        drawn = self.normal_of(mean, std, tensors[0])
        return drawn if drawn is LEFT_TO_TORCH else drawn.to(dtype)  # type: ignore[union-attr]

    def scale_draws(self, drawn: Drawn, mean: Tensor | float, std: Tensor | float) -> Drawn:
        """Scales and shifts draws. Eager raises for a negative deviation; unchecked, a tensor gives NaN there."""
        if drawn is LEFT_TO_TORCH or (not isinstance(std, Tensor) and std < 0):
            return LEFT_TO_TORCH
        scale = torch.where(std >= 0, std, math.nan) if isinstance(std, Tensor) else std
        return drawn * scale + mean  # type: ignore[return-value]

    def exponential(self, x: Tensor, rate: float = 1.0) -> Drawn:
        return self._through(x, lambda u: -torch.log1p(-u) / rate) if rate > 0 else LEFT_TO_TORCH

    def geometric(self, x: Tensor, p: float) -> Drawn:
        if not 0 < p < 1:
            return LEFT_TO_TORCH
        drawn = torch.log1p(-self._draw(x.shape, "uniform", _wide(x.dtype), x.device)) / math.log1p(-p)
        return torch.ceil(drawn).clamp(min=1).to(x.dtype)

    def cauchy(self, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Drawn:
        if sigma <= 0:
            return LEFT_TO_TORCH
        return self._through(x, lambda u: torch.tan(math.pi * (u - 0.5)) * sigma + median)

    def log_normal(self, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Drawn:
        if not (std > 0 and x.dtype in MANTISSA_BITS):
            return LEFT_TO_TORCH
        return torch.exp(self._draw(x.shape, "normal", _wide(x.dtype), x.device) * std + mean).to(x.dtype)

    def choices(self, x: Tensor, num_samples: IntLikeType, replacement: bool = False) -> Drawn:
        """Computes multinomial: indices along the last dim, with probabilities proportional to the weights."""
        if x.dtype not in MANTISSA_BITS or x.dim() not in (1, 2) or num_samples <= 0:
            return LEFT_TO_TORCH
        if not replacement and num_samples > x.shape[-1]:
            return LEFT_TO_TORCH
        weights = x.to(_wide(x.dtype))
        total = weights.sum(-1, keepdim=True)
        sound = (weights >= 0).all(-1, keepdim=True) & (total > 0) & (total < torch.inf)
        several = self._with_replacement if replacement and num_samples > 1 else self._without_replacement
        return torch.where(sound, several(weights, num_samples), NO_CHOICE)

    def leaky(
        self, x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
    ) -> tuple[Tensor, Tensor] | Drawn:
        """Computes rrelu: a random slope for each element that is not positive; returns the slopes too, for the backward."""
        if not training:
            return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise.clone()
        drawn = self.uniform_between(x, lower, upper)
        if drawn is LEFT_TO_TORCH:
            return LEFT_TO_TORCH
        slopes = torch.where(x <= 0, drawn, 1.0)
        return x * slopes, slopes

    def _with_replacement(self, weights: Tensor, count: IntLikeType) -> Tensor:
        """Draws a uniform number below the sum of all weights; chooses the first index whose partial sum is above it."""
        sums = weights.cumsum(-1)
        last = sums[..., -1:]
        drawn = self._draw([*weights.shape[:-1], count], "uniform", weights.dtype, weights.device) * last
        below = torch.minimum(drawn, torch.nextafter(last, torch.zeros_like(last)))
        return torch.searchsorted(sums, below, right=True)

    def _without_replacement(self, weights: Tensor, count: IntLikeType) -> Tensor:
        """Chooses the indices with the shortest exponential waiting times at these rates (Efraimidis and Spirakis, 2006)."""
        waits = -torch.log1p(-self._draw(weights.shape, "uniform", weights.dtype, weights.device))
        haste = weights / waits.clamp(min=torch.finfo(weights.dtype).tiny)
        haste = torch.where(weights > 0, haste, -1.0)
        return haste.argmax(-1, keepdim=True) if count == 1 else torch.topk(haste, count).indices

    def _real(self, size: Size, kind: Kind, scale_if_complex: float, **options: Unpack[TensorOptions]) -> Drawn:
        dtype, device = _dtype_and_device(options, torch.get_default_dtype())
        if dtype in _COMPLEX:
            real, imaginary = (self._draw(size, kind, _COMPLEX[dtype], device) for _ in range(2))
            return torch.complex(real, imaginary) * scale_if_complex
        return self._draw(size, kind, dtype, device) if dtype in MANTISSA_BITS else LEFT_TO_TORCH

    def _below(self, x: Tensor, chance: Tensor | float) -> Tensor:
        """Whether a uniform number is below the probability, for each element."""
        dtypes = (x.dtype, chance.dtype if isinstance(chance, Tensor) else None)
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return self._draw(x.shape, "uniform", wide, x.device) < chance  # type: ignore[no-any-return]

    def _through(self, x: Tensor, inverse: Callable[[Tensor], Tensor]) -> Drawn:
        """Draws numbers whose distribution function has this inverse."""
        if x.dtype not in MANTISSA_BITS:
            return LEFT_TO_TORCH
        return inverse(self._draw(x.shape, "uniform", _wide(x.dtype), x.device)).to(x.dtype)

    def _draw(self, size: Size, kind: Kind, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = DRAW_SEED(device) + (next(self._numbers) + (take_traced_shard() << 48))
        return RANDOM(key, list(size), kind, dtype)  # type: ignore[no-any-return]


def _from_default_generator(rewrite: Rewrite) -> Rewrite:
    """Restricts a rewrite to calls without a generator, and with strided layout."""

    def run(
        *args: object, generator: object = None, layout: object = None, pin_memory: object = None, **named: object
    ) -> Drawn | tuple[Tensor, Tensor]:
        if generator is not None or layout not in (None, torch.strided):
            return LEFT_TO_TORCH
        return rewrite(*args, **named)

    return run


def _like(
    x: Tensor,
    draw: Callable[..., Drawn],
    *bounds: IntLikeType,
    memory_format: torch.memory_format | None = None,
    **options: Unpack[TensorOptions],
) -> Drawn:
    given = {name: value for name, value in options.items() if value is not None}
    drawn = draw(x.shape, *bounds, **{**_options_of(x), **given})
    if drawn is LEFT_TO_TORCH or x.is_contiguous():
        return drawn
    return drawn.contiguous(memory_format=memory_format or suggest_memory_format(x))


def _options_of(x: Tensor) -> TensorOptions:
    return {"dtype": x.dtype, "device": x.device}


def _dtype_and_device(options: TensorOptions, usual: torch.dtype) -> tuple[torch.dtype, torch.device]:
    dtype, device = options.get("dtype"), options.get("device")
    return usual if dtype is None else dtype, torch.device("cpu" if device is None else device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is_in_range(dtype: torch.dtype, number: IntLikeType) -> bool:
    """Whether a number is within a dtype's limits; torch raises otherwise. A symbolic number is assumed to be."""
    if not isinstance(number, int):
        return True
    if dtype == torch.bool:
        return number in (0, 1)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)


def _largest_whole(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return 1 << MANTISSA_BITS.get(dtype, 0)
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
