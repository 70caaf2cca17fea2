"""The package's own lowerings, through the door that users' kernels take (`dynaxla.register_lowering`)."""

from __future__ import annotations

from functools import cache

from dynaxla.lowering.jax_rules import all_rules
from dynaxla.ops.lowerings import Lowering, Lowerings
from dynaxla.ops.registry import op_table
from dynaxla.ops.tables.padding import PAD_RULES


@cache
def core_lowerings() -> Lowerings:
    """Every row of the op table with its JAX body and its pad rule; imports JAX."""
    rules = all_rules()
    rows = op_table().items()
    return Lowerings(pads=PAD_RULES).adding(
        Lowering(row, rules.get(target), PAD_RULES.get(target)) for target, row in rows
    )
