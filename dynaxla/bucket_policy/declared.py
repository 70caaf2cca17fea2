"""The one enumeration of declared buckets: warm-up, packages, targets elsewhere and servers compile these."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from dynaxla.bucket_policy.base import BucketPolicy
from dynaxla.bucket_policy.bounded import Bounded

_K = TypeVar("_K", bound=Hashable)

SMALLEST = 2
"""Where no minimum is declared: Dynamo makes graphs of their own for sizes 0 and 1."""


def declared_buckets(policy: BucketPolicy | None) -> tuple[int, ...] | None:
    """The buckets of a range of sizes, ascending; None where none with a largest size is declared."""
    if not isinstance(policy, Bounded) or policy.max is None:
        return None
    return policy.buckets(SMALLEST if policy.min is None else policy.min, policy.max)


def combinations(buckets: Mapping[_K, tuple[int, ...]]) -> Iterator[dict[_K, int]]:
    """Every choice of one bucket for each name of what varies."""
    for chosen in itertools.product(*buckets.values()):
        yield dict(zip(buckets, chosen, strict=True))
