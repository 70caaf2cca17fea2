"""Expressions in which sizes are used as values: every one at several sizes, forward and backward."""

from tests.bucketing.sizes_as_values import arithmetic, indices, models, moves, slices, symbols, windows, writes
from tests.bucketing.sizes_as_values.expression import SIZES, Family

FAMILIES: tuple[Family, ...] = (
    *slices.FAMILIES,
    *moves.FAMILIES,
    *indices.FAMILIES,
    *arithmetic.FAMILIES,
    *writes.FAMILIES,
    *symbols.FAMILIES,
    *windows.FAMILIES,
    *models.FAMILIES,
)

__all__ = ["FAMILIES", "SIZES", "Family"]
