"""Decomposes ops on lists of tensors, which optimizers use, into the same op on every tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.types import Number

from dynaxla.torch_api.overloads import OpOverload, base_name, changes_arguments, overloads_named

aten = torch.ops.aten
_PREFIX = "_foreach_"


def _addcmul(self: Tensor, one: Tensor, other: Tensor, value: Number = 1) -> Tensor:
    return torch.addcmul(self, one, other, value=value)


def _addcdiv(self: Tensor, one: Tensor, other: Tensor, value: Number = 1) -> Tensor:
    return torch.addcdiv(self, one, other, value=value)


def _norm(self: Tensor, order: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(self, order, dtype=dtype)
    return norm


# Ops for which torch has no function of the same name and arguments.
_SINGLE_OPS: Mapping[str, Callable[..., Tensor]] = {
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "copy": aten.copy.default,
    "maximum": torch.clamp_min,
    "minimum": torch.clamp_max,
    "norm": _norm,
    "zero": torch.zeros_like,
}


@cache
def foreach_decompositions() -> Mapping[OpOverload, Callable[..., list[Tensor]]]:
    """Returns a decomposition of every functional `_foreach_` op, which changes none of its arguments."""
    found = {}
    for op in overloads_named(f"aten::{_PREFIX}"):
        name = base_name(op).removeprefix(_PREFIX)
        single_op = _SINGLE_OPS.get(name) or getattr(torch, name, None)
        if single_op is not None and not changes_arguments(op):
            found[op] = _apply_to_each(single_op)
    return found


def _apply_to_each(single_op: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Makes an op on lists: one call for each index. An argument that is no list is passed to every call."""

    def run(*args: object, **kwargs: object) -> list[Tensor]:
        count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
        columns = [arg if isinstance(arg, (list, tuple)) else [arg] * count for arg in args]
        return [single_op(*(column[i] for column in columns), **kwargs) for i in range(count)]

    return run
