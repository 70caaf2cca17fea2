"""A policy limited to the declared range of a dim's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynaxla.bucket_policy.base import BucketPolicy, require_above, require_whole
from dynaxla.errors import BucketError, OptionError


@dataclass(frozen=True, slots=True)
class Bounded(BucketPolicy):
    """Limits another policy to a declared minimum and maximum: no bucket is outside of them.

    Attributes:
        policy: the policy of sizes within the range.
        min, max: the smallest and the largest expected size, or None.
        above: a size above `max` is its own bucket ("exact") or an error ("error").

    Raises:
        OptionError: the range is empty, or `above` is another value.
    """

    policy: BucketPolicy
    min: int | None = None
    max: int | None = None
    above: Literal["error", "exact"] = "exact"

    def __post_init__(self) -> None:
        require_above(self.above)
        for name, value in (("min", self.min), ("max", self.max)):
            if value is not None:
                require_whole(value, 0, f"{name} of a range of sizes")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise OptionError(f"no size lies between min={self.min} and max={self.max}", "write min <= max")

    def _bucket(self, size: int) -> int:
        """Raises BucketError for a size above `max` if `above` is "error"."""
        if self.max is None or size <= self.max:
            bucket = self.policy.bucket(max(size, self.min or 0))
            return bucket if self.max is None else min(bucket, self.max)
        if self.above == "error":
            raise BucketError(
                f"size {size} is above the declared maximum, {self.max}",
                'declare a larger maximum, or let larger sizes compile exactly with above="exact"',
            )
        return size
