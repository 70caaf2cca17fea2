"""Where a part is compiled: at a bucket, or at exact sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynaxla.bucketing.size_buckets import PartBucket
from dynaxla.torch_api.fakes import FakeTensorMode


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """What an exact shape depends on of a tensor that a call gives.

    Attributes:
        shape, strides: in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any) -> Any:
        """What stands for an argument of a call: such a description, or a plain number itself."""
        if not isinstance(value, torch.Tensor):
            return value
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)


def empty_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Arguments like those described, without memory."""
    with FakeTensorMode():
        return [
            torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device=each.device)
            if isinstance(each, ArgumentSpec)
            else each
            for each in arguments
        ]


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A bucket.

    Attributes:
        order: of the symbols in a call's values.
    """

    buckets: PartBucket
    order: tuple[sympy.Symbol, ...]


@dataclass(frozen=True, slots=True)
class ExactSpec:
    """Exact sizes: the arguments of a call, or descriptions of them."""

    arguments: Sequence[Any]


ProgramSpec = BucketSpec | ExactSpec
