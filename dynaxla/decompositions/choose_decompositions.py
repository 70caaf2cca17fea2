"""Chooses which ops AOTAutograd decomposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynaxla.decompositions.decomposition_table import decomposition_table
from dynaxla.decompositions.quantized import quantized_decompositions
from dynaxla.decompositions.random_draws import random_decompositions
from dynaxla.ops.table import core_table
from dynaxla.torch_api.overloads import OpOverload


def choose_decompositions(rules: Mapping[OpOverload, Any], rng: str) -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions of a graph: those of random ops only if `rng` is "compiled", none of ops to which the user
    gave a body.

    Args:
        rules: the JAX body of each op.
        rng: the option.
    """
    own = core_table().bodies
    available = {**decomposition_table(), **quantized_decompositions()}
    if rng == "compiled":
        available = {**available, **random_decompositions()}
    return {op: rewrite for op, rewrite in available.items() if rules.get(op) is own.get(op)}
