"""The op table: every row, by overload. Read-only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType

from torch._ops import OpOverload

from dynaxla.ops.spec import OpSpec, Support


def build_table(families: Iterable[Iterable[OpSpec]]) -> Mapping[OpOverload, OpSpec]:
    """One mapping of all rows.

    Raises:
        ValueError: two rows speak of one overload.
    """
    table: dict[OpOverload, OpSpec] = {}
    for rows in families:
        for row in rows:
            if row.target in table:
                raise ValueError(f"{row.target} has two rows in the op table")
            table[row.target] = row
    return MappingProxyType(table)


@cache
def op_table() -> Mapping[OpOverload, OpSpec]:
    """The table of this package."""
    from dynaxla.ops.tables import core, data, nn, pointwise, resampling, spectral

    return build_table((core.ROWS, data.ROWS, nn.ROWS, pointwise.ROWS, resampling.ROWS, spectral.ROWS))


@cache
def rule_targets() -> frozenset[OpOverload]:
    """Overloads whose rows say that a JAX rule is their body."""
    return frozenset(row.target for row in op_table().values() if row.support is Support.JAX)
