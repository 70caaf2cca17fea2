"""The op table: every row, by overload. Read-only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import torch
from torch._ops import OpOverload

from dynaxla.ops.spec import OpSpec, Support


def build_table(
    families: Iterable[Iterable[OpSpec]], lowered: Mapping[OpOverload, frozenset[torch.dtype]]
) -> Mapping[OpOverload, OpSpec]:
    """One mapping of all rows; `lowered` says in which dtypes torch-mlir itself lowers an op right.

    Raises:
        ValueError: two rows speak of one overload.
    """
    table: dict[OpOverload, OpSpec] = {}
    for rows in families:
        for row in rows:
            if row.target in table:
                raise ValueError(f"{row.target} has two rows in the op table")
            is_lowered = row.support is Support.JAX and row.target in lowered
            table[row.target] = (
                replace(row, support=Support.LOWERED, lowered=lowered[row.target]) if is_lowered else row
            )
    return MappingProxyType(table)


@cache
def op_table() -> Mapping[OpOverload, OpSpec]:
    """The table of this package."""
    from dynaxla.ops.tables import core, data, nn, pointwise, resampling, spectral, torch_mlir

    families = (core.ROWS, data.ROWS, nn.ROWS, pointwise.ROWS, resampling.ROWS, spectral.ROWS)
    return build_table(families, torch_mlir.LOWERED)


@cache
def rule_targets() -> frozenset[OpOverload]:
    """Overloads that have a JAX rule: those of JAX rows, and those of LOWERED rows for what torch-mlir does not take."""
    return frozenset(row.target for row in op_table().values() if row.support in (Support.JAX, Support.LOWERED))
