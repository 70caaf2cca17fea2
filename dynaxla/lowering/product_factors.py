"""The factors of a StableHLO product: which of their dims it keeps, and over which it sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dynaxla.lowering.stablehlo_module import StablehloModules

# Of jaxlib's bindings of MLIR, which have no types.
Operation: TypeAlias = Any
Value: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class ProductFactor:
    """An operand of a product, or what it is the transpose of.

    Attributes:
        value: a tensor.
        batching: its dims that the product keeps, one by one with the other factor's.
        contracting: its dims over which the product sums.
        free: its other dims, in the order in which the product has them.
    """

    value: Value
    batching: tuple[int, ...]
    contracting: tuple[int, ...]
    free: tuple[int, ...]

    @classmethod
    def both(cls, mlir: StablehloModules, product: Operation) -> tuple[ProductFactor, ProductFactor]:
        dims = mlir.stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
        left = cls._of(mlir, product.operands[0], dims.lhs_batching_dimensions, dims.lhs_contracting_dimensions)
        right = cls._of(mlir, product.operands[1], dims.rhs_batching_dimensions, dims.rhs_contracting_dimensions)
        return left, right

    @classmethod
    def _of(
        cls, mlir: StablehloModules, value: Value, batching: Sequence[int], contracting: Sequence[int]
    ) -> ProductFactor:
        bound = {*batching, *contracting}
        order: Sequence[int] = range(len(shape_of(mlir, value)))
        free = [dim for dim in order if dim not in bound]
        if isinstance(value.owner, mlir.ir.OpView) and value.owner.operation.name == "stablehlo.transpose":
            value, order = value.owner.operands[0], list(value.owner.attributes["permutation"])
        return cls(value, *(tuple(order[dim] for dim in dims) for dims in (batching, contracting, free)))

    def count_rows(self, mlir: StablehloModules) -> int:
        shape = shape_of(mlir, self.value)
        return math.prod(shape[dim] for dim in self.free)

    def is_of_rows(self, mlir: StablehloModules) -> bool:
        """Whether the product sums elements that are neighbours in memory."""
        return self.contracting == (len(shape_of(mlir, self.value)) - 1,)


def shape_of(mlir: StablehloModules, value: Value) -> Sequence[int]:
    return list(mlir.ir.RankedTensorType(value.type).shape)
