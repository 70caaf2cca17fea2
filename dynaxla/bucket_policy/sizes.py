"""The policies that users name in options and marks. `dynaxla` exports every class named in `__all__`."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal

from dynaxla.bucket_policy.base import (
    BucketPolicy,
    is_number,
    next_power_of_two,
    require_above,
    require_power_of_two,
    require_whole,
)
from dynaxla.errors import BucketError, OptionError

__all__ = ["Default", "Exact", "Explicit", "Geometric", "Multiples", "PowersOfTwo"]

LEAST_WASTE, MOST_WASTE = 0.01, 10.0  # a smaller waste makes nearly every size a bucket, a larger one is a mistake


@dataclass(frozen=True, slots=True)
class Exact(BucketPolicy):
    """Every size is its own bucket: no padding, one program per size."""

    def _bucket(self, size: int) -> int:
        return size


@dataclass(frozen=True, slots=True)
class PowersOfTwo(BucketPolicy):
    """Pads to the next power of two: less than twice the size, for sizes above `min`.

    Attributes:
        min: the smallest bucket of sizes >= 2, a power of two.

    Raises:
        OptionError: `min` is not a power of two.
    """

    min: int = 1

    def __post_init__(self) -> None:
        require_power_of_two(self.min, "PowersOfTwo(min=...)")

    def _bucket(self, size: int) -> int:
        return max(self.min, next_power_of_two(size))


@dataclass(frozen=True, slots=True)
class Multiples(BucketPolicy):
    """Pads to the next multiple of `of`.

    Raises:
        OptionError: `of` is not a whole number >= 1.
    """

    of: int

    def __post_init__(self) -> None:
        require_whole(self.of, 1, "Multiples(of=...)")

    def _bucket(self, size: int) -> int:
        return _round_up(size, self.of)


@dataclass(frozen=True, slots=True)
class Geometric(BucketPolicy):
    """Buckets that grow by a factor: each is at most 1 + waste times the smallest size padded to it.

    If that smallest size, rounded up to `multiple_of`, is larger, it is the bucket. The lookup takes time proportional to the
    number of buckets below the size.

    Attributes:
        waste: maximum padding per true element; from 0.01 to 10.
        multiple_of: every bucket >= 2 is a multiple of this.

    Raises:
        OptionError: an attribute is outside its range.
    """

    waste: float = 0.25
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not (is_number(self.waste) and LEAST_WASTE <= self.waste <= MOST_WASTE):
            raise OptionError(
                f"Geometric(waste={self.waste!r}) is not a number from {LEAST_WASTE:g} to {MOST_WASTE:g}",
                "0.25 allows 25% of padding; for no padding use Exact()",
            )
        require_whole(self.multiple_of, 1, "Geometric(multiple_of=...)")

    def _bucket(self, size: int) -> int:
        bucket = 1
        while bucket < size:
            bucket = self._largest_from(bucket + 1)
        return bucket

    def _largest_from(self, smallest: int) -> int:
        """Returns the bucket with this smallest size. Rounding down keeps the maximum waste; the size must still fit."""
        allowed = math.floor(smallest * (1 + self.waste))
        return max(allowed // self.multiple_of * self.multiple_of, _round_up(smallest, self.multiple_of))


@dataclass(frozen=True, slots=True)
class Explicit(BucketPolicy):
    """Pads to the next listed bucket.

    Attributes:
        sizes: the buckets, ascending.
        above: a size above the last is its own bucket ("exact") or an error ("error").

    Raises:
        OptionError: the sizes are not a tuple of ascending whole numbers >= 1, or `above` is another value.
    """

    sizes: tuple[int, ...]
    above: Literal["error", "exact"] = "exact"

    def __post_init__(self) -> None:
        hint = "list the buckets in ascending order, for instance Explicit((64, 128, 256))"
        if not isinstance(self.sizes, tuple) or not self.sizes:
            raise OptionError(f"Explicit(sizes={self.sizes!r}) is not a tuple of sizes", hint)
        for size in self.sizes:
            require_whole(size, 1, "a size of Explicit")
        if any(left >= right for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise OptionError(f"Explicit(sizes={self.sizes!r}) is not ascending", hint)
        require_above(self.above)

    def _bucket(self, size: int) -> int:
        """Raises BucketError for a size above the last bucket if `above` is "error"."""
        index = bisect.bisect_left(self.sizes, size)
        if index < len(self.sizes):
            return self.sizes[index]
        if self.above == "error":
            raise BucketError(
                f"size {size} is above the largest bucket, {self.sizes[-1]}",
                'list a larger bucket, or let larger sizes compile exactly with above="exact"',
            )
        return size


@dataclass(frozen=True, slots=True)
class Default(BucketPolicy):
    """Keeps small sizes exact; above, evenly spaced buckets between each power of two and the next.

    Between 2^e and 2^(e+1) the buckets are 2^e / steps apart, but at least `multiple_of`; below `multiple_of`
    they are the powers of two. So every bucket above `exact_up_to` is a multiple of `multiple_of` or a smaller power of
    two, every power of two is a bucket, and a bucket is less than 1 + 1/steps times any of its sizes above
    steps * multiple_of, less than twice any size below. The spacing is that of a floating-point number with
    log2(steps) bits of mantissa.

    Measured on 2 million log-normal lengths (mu = ln 60, sigma = 0.9, cut to 4..512): the number of buckets of the
    sizes 1..512, the mean of padded / true size, the total padded / total true size:

        DEFAULT                   15 buckets   1.232   1.202
        Default(multiple_of=128)  12 buckets   1.409   1.374
        Default(multiple_of=8)    16 buckets   1.199   1.194
        PowersOfTwo()             10 buckets   1.424   1.425

    Attributes:
        exact_up_to: sizes up to this are their own buckets.
        steps: buckets per doubling, a power of two.
        multiple_of: large buckets are multiples of this, a power of two.

    Raises:
        OptionError: an attribute is not a number of this kind.
    """

    exact_up_to: int = 4
    steps: int = 2
    multiple_of: int = 16

    def __post_init__(self) -> None:
        require_whole(self.exact_up_to, 0, "Default(exact_up_to=...)")
        require_power_of_two(self.steps, "Default(steps=...)")
        require_power_of_two(self.multiple_of, "Default(multiple_of=...)")

    def _bucket(self, size: int) -> int:
        if size <= self.exact_up_to:
            return size
        below = next_power_of_two(size) // 2
        return _round_up(size, max(below // self.steps, min(self.multiple_of, below)))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


DEFAULT = Default()
