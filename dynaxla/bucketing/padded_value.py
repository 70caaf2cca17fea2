"""Values of a padded program: which of their elements are real, and what their padding holds."""

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
    """One factor of a dim's size: `padded` positions, of which the first `size` are real.

    Attributes:
        padded: the padded size: the largest value of `size` at any true sizes of the bucket.
        size: the true size, an int or an expression over the part's symbols.
    """

    padded: int
    size: Size

    @property
    def is_full(self) -> bool:
        """Whether every position is real at every true size."""
        return isinstance(self.size, int)


Dim = tuple[Factor, ...]
"""A dim of a padded value as factors in row-major order: `view` merges (batch, length) into one dim of two factors."""


def padded_size(dim: Dim) -> int:
    """The size of a dim in the padded program."""
    return math.prod(factor.padded for factor in dim)


def is_full(dim: Dim) -> bool:
    return all(factor.is_full for factor in dim)


def merge_factors(dim: Dim) -> Dim:
    """The same dim with as few factors as possible: a full factor is merged into the one before it."""
    result: list[Factor] = []
    for factor in dim:
        if result and factor.is_full:
            before = result.pop()
            size = before.size * factor.size if before.is_full else sympy.Mul(before.size, factor.size)
            factor = Factor(before.padded * factor.padded, size)
        result.append(factor)
    return tuple(result)


def have_same_layout(left: Dim, right: Dim) -> bool:
    """Whether two dims have their real elements at the same positions."""
    return left == right or merge_factors(left) == merge_factors(right)


def single_factor(dim: Dim) -> Factor:
    """The dim as a single factor, that is, with all real elements in front.

    Raises:
        Unpaddable: there is padding between real elements.
    """
    found = merge_factors(dim)
    if len(found) > 1:
        raise Unpaddable("the dim is several dims in one, with padding in between")
    return found[0] if found else Factor(1, 1)


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """A tensor of the padded program.

    Attributes:
        node: the node that computes it.
        dims: which of its elements are real.
        fill: the number that all padding elements hold; None if it is unknown (padding may be NaN).
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


Results: TypeAlias = PaddedValue | tuple[PaddedValue | None, ...]
"""The result of a call, or a tuple of results with None for each that is unknown on padded values."""

Operand: TypeAlias = Argument | PaddedValue | Sequence["Operand"]
"""An argument of a call or of a node; tensors may be padded values."""


class Unpaddable(Exception):
    """A node cannot run on padded values.

    Attributes:
        detail: why, for the user.
        of_bucket: whether this holds for this bucket only.
    """

    def __init__(self, detail: str, of_bucket: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.of_bucket = of_bucket
