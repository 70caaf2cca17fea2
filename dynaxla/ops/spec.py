"""What is known about one ATen overload: the row type of the op table."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._ops import OpOverload


class Support(enum.Enum):
    """How an op reaches StableHLO."""

    LOWERED = "lowered"  # torch-mlir lowers it in the dtypes of the row's `lowered`, a JAX function in the others
    DECOMPOSED = "decomposed"  # rewritten to simpler ATen ops during capture
    JAX = "jax"  # a JAX function in lowering/jax_rules, linked into the same module
    FALLBACK = "fallback"  # runs in eager PyTorch, with a reason


Check = Callable[[torch.fx.Node], str | None]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the op table, for one overload (never for an overload packet).

    Attributes:
        target: the overload this row speaks of.
        support: how it reaches StableHLO.
        check: looks at one call (arguments and `meta["val"]`); returns why this call cannot be lowered, or None.
        dtypes: tensor dtypes (of inputs and outputs) the row covers; None means every dtype XLA has.
        lowered: operand dtypes in which torch-mlir's own lowering was found right in every call of the sweep
            (`tables.torch_mlir`); calls in other dtypes take the row's JAX rule.
        limits: one line for docs/ops.md about what the row does not cover; the hint of the fallback reason.
    """

    target: OpOverload
    support: Support
    check: Check | None = None
    dtypes: frozenset[torch.dtype] | None = None
    limits: str = ""
    lowered: frozenset[torch.dtype] = frozenset()
