"""What is known of a padded value: which of its elements are real, and what the others hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch.fx import Node
from torch.fx.node import Argument

from dynaxla.bucketing.size_expressions import Size

Number: TypeAlias = bool | int | float | complex


@dataclass(frozen=True, slots=True)
class Factor:
    """A run of a dim: `padded` places, of which the first `size` are real.

    Attributes:
        padded: places; the size's largest value at any true sizes of the bucket.
        size: the true size, an int or an expression over the part's symbols.
    """

    padded: int
    size: Size

    @property
    def is_full(self) -> bool:
        """Whether every place is real at every true size."""
        return isinstance(self.size, int)


Dim = tuple[Factor, ...]
"""A dim of a value, as factors in row-major order: `view` merges (batch, length) into one dim of two factors."""


def places(dim: Dim) -> int:
    """The dim's size in the padded program."""
    return math.prod(factor.padded for factor in dim)


def is_full(dim: Dim) -> bool:
    return all(factor.is_full for factor in dim)


def joined(dim: Dim) -> Dim:
    """The same real elements in as few factors as possible: a full factor behind another one only makes it longer."""
    result: list[Factor] = []
    for factor in dim:
        if result and factor.is_full:
            before = result.pop()
            size = before.size * factor.size if before.is_full else sympy.Mul(before.size, factor.size)
            factor = Factor(before.padded * factor.padded, size)
        result.append(factor)
    return tuple(result)


def same_places(left: Dim, right: Dim) -> bool:
    """Whether two dims hold their real elements in the same places."""
    return left == right or joined(left) == joined(right)


def run_of(dim: Dim) -> Factor:
    """A dim whose real elements all come first, as one factor.

    Raises:
        Unpaddable: there is padding between real elements.
    """
    found = joined(dim)
    if len(found) > 1:
        raise Unpaddable("the dim is several dims in one, with padding in between")
    return found[0] if found else Factor(1, 1)


@dataclass(frozen=True, slots=True)
class Padded:
    """A value of the padded program.

    Attributes:
        node: it.
        dims: which of its elements are real.
        fill: what all the others hold, a plain number; None if that is not known (it may be NaN).
    """

    node: Node
    dims: tuple[Dim, ...]
    fill: Number | None = None

    @property
    def is_full(self) -> bool:
        return all(map(is_full, self.dims))

    @property
    def meta(self) -> torch.Tensor:
        """The fake tensor, at padded sizes."""
        found: torch.Tensor = self.node.meta["val"]
        return found


Results: TypeAlias = Padded | tuple[Padded | None, ...]
"""What a call gives: one result, or several, with None for one that is not known on padded values."""

Operand: TypeAlias = Argument | Padded | Sequence["Operand"]
"""An argument of a call, or of a node: tensors may still be padded values."""


class Unpaddable(Exception):
    """A node cannot run on padded values.

    Attributes:
        detail: why, readable.
        of_bucket: whether that is so at this bucket, while the node may be padded at others.
    """

    def __init__(self, detail: str, of_bucket: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.of_bucket = of_bucket
