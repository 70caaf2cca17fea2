"""Collectives of compiled graphs: torch's functional collectives with the groups of all processes that run the program.

`ranks` are the processes that run the program together, in order; a process's number is its place there. `groups` are the
numbers of each group's processes, one group after the other, each of `size` processes: the same in every process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.c10d import find_group, permute_in_group, run_functional

Ints = list[int]


@torch.library.custom_op("dynaxla::all_reduce", mutates_args=())
def all_reduce(x: Tensor, reduction: str, groups: Ints, size: int, ranks: Ints) -> Tensor:
    """The reduction of the operands of a process's group."""
    return run_functional("all_reduce", groups, size, ranks, x, reduction)


@all_reduce.register_fake
def _(x: Tensor, reduction: str, groups: Ints, size: int, ranks: Ints) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dynaxla::all_gather", mutates_args=())
def all_gather(x: Tensor, groups: Ints, size: int, ranks: Ints) -> Tensor:
    """The operands of a process's group, one after the other along dim 0."""
    return run_functional("all_gather_into_tensor", groups, size, ranks, x, size)


@all_gather.register_fake
def _(x: Tensor, groups: Ints, size: int, ranks: Ints) -> Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]) if x.dim() else (size,))


@torch.library.custom_op("dynaxla::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, reduction: str, groups: Ints, size: int, ranks: Ints) -> Tensor:
    """A process's piece, along dim 0, of the reduction of its group's operands."""
    return run_functional("reduce_scatter_tensor", groups, size, ranks, x, reduction, size)


@reduce_scatter.register_fake
def _(x: Tensor, reduction: str, groups: Ints, size: int, ranks: Ints) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@torch.library.custom_op("dynaxla::all_to_all", mutates_args=())
def all_to_all(x: Tensor, groups: Ints, size: int, ranks: Ints) -> Tensor:
    """Of each operand of the group the piece, along dim 0, that is the process's, one after the other."""
    splits = [x.shape[0] // size] * size
    return run_functional("all_to_all_single", groups, size, ranks, x, splits, splits)


@all_to_all.register_fake
def _(x: Tensor, groups: Ints, size: int, ranks: Ints) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dynaxla::broadcast", mutates_args=())
def broadcast(x: Tensor, root: int, groups: Ints, size: int, ranks: Ints) -> Tensor:
    """The operand of the group's process `root`, by its place in the group."""
    return run_functional("broadcast", groups, size, ranks, x, root)


@broadcast.register_fake
def _(x: Tensor, root: int, groups: Ints, size: int, ranks: Ints) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dynaxla::permute", mutates_args=())
def permute(x: Tensor, targets: Ints, groups: Ints, size: int, ranks: Ints) -> Tensor:
    """The operand of the process of the group that sends to this one: that at place i sends to that at `targets[i]`."""
    return permute_in_group(x, targets, find_group(groups, size, ranks))


@permute.register_fake
def _(x: Tensor, targets: Ints, groups: Ints, size: int, ranks: Ints) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dynaxla::permute_tensor", mutates_args=())
def permute_tensor(x: Tensor, targets: Ints, group: str) -> Tensor:
    """`permute` in a group of this process's, of this name."""
    return permute_in_group(x, targets, group)


@permute_tensor.register_fake
def _(x: Tensor, targets: Ints, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _permute_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    sources = [ctx.targets.index(place) for place in range(len(ctx.targets))]
    return PERMUTE_TENSOR(gradient.contiguous(), sources, ctx.group), None, None


def _keep_targets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.targets, ctx.group = inputs


permute_tensor.register_autograd(_permute_back, setup_context=_keep_targets)

PERMUTE_TENSOR = torch.ops.dynaxla.permute_tensor.default
PERMUTE = torch.ops.dynaxla.permute.default
ALL_REDUCE = torch.ops.dynaxla.all_reduce.default
ALL_GATHER = torch.ops.dynaxla.all_gather.default
REDUCE_SCATTER = torch.ops.dynaxla.reduce_scatter.default
ALL_TO_ALL = torch.ops.dynaxla.all_to_all.default
BROADCAST = torch.ops.dynaxla.broadcast.default
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, PERMUTE)


def find_ranks(target: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The processes that run a call together; None for an op that one process runs alone."""
    return tuple(args[-1]) if target in COLLECTIVES else None
