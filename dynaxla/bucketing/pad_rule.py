"""Finds the pad rule of an op."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dynaxla.bucketing.argument_roles import PadRule, no_rule
from dynaxla.bucketing.pad_rules.elementwise import elementwise
from dynaxla.torch_api.overloads import OpOverload

PadRules = Mapping[OpOverload, PadRule]


def rule_of(target: OpOverload, rules: PadRules) -> PadRule:
    """The rule of an op: its own, `elementwise` for other ops that torch tags as pointwise, else `no_rule`."""
    return rules.get(target, elementwise if torch.Tag.pointwise in target.tags else no_rule)
