"""The op table and the JAX rules name the same overloads."""

from __future__ import annotations

from dynaxla.lowering.jax_rules import all_rules
from dynaxla.ops.registry import op_table, rule_targets


def test_every_rule_has_a_row() -> None:
    assert set(all_rules()) <= set(op_table())


def test_every_jax_row_has_a_rule() -> None:
    assert rule_targets() <= set(all_rules())
