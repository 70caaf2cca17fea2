"""Ops on lists of tensors, of which optimizers are made, as the same op on every tensor."""

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


# Those for which torch has no function of the same name and arguments.
_ON_ONE: Mapping[str, Callable[..., Tensor]] = {
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
    """A decomposition of every `_foreach_` op of functional graphs, which change none of their arguments."""
    found = {}
    for op in overloads_named(f"aten::{_PREFIX}"):
        name = base_name(op).removeprefix(_PREFIX)
        on_one = _ON_ONE.get(name) or getattr(torch, name, None)
        if on_one is not None and not changes_arguments(op):
            found[op] = _each(on_one)
    return found


def _each(on_one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """The op on lists: a call for each place in them. An argument that is no list goes to every call."""

    def run(*args: object, **kwargs: object) -> list[Tensor]:
        count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))
        columns = [arg if isinstance(arg, (list, tuple)) else [arg] * count for arg in args]
        return [on_one(*(column[i] for column in columns), **kwargs) for i in range(count)]

    return run
