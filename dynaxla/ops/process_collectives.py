"""Collectives of several processes, which torch.distributed's functional collectives become."""

from __future__ import annotations

import jax

from dynaxla.bucketing.pad_rules import process_collectives as process_collectives_rules
from dynaxla.custom_ops.process_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE_SCATTER,
)
from dynaxla.ops import replica_collectives as collectives
from dynaxla.ops.record import OpFamily
from dynaxla.ops.views import Ints
from dynaxla.types import Groups

OPS = OpFamily()


@OPS.op(ALL_REDUCE, pad=process_collectives_rules.collective)
def all_reduce(x: jax.Array, reduction: str, groups: Ints, size: int, ranks: Ints) -> jax.Array:
    return collectives.all_reduce(x, _rows(groups, size), reduction)


@OPS.op(ALL_GATHER, pad=process_collectives_rules.all_gather)
def all_gather(x: jax.Array, groups: Ints, size: int, ranks: Ints) -> jax.Array:
    return collectives.all_gather(x if x.ndim else x[None], _rows(groups, size))


@OPS.op(REDUCE_SCATTER, pad=process_collectives_rules.reduce_scatter)
def reduce_scatter(x: jax.Array, reduction: str, groups: Ints, size: int, ranks: Ints) -> jax.Array:
    return collectives.reduce_scatter(x, _rows(groups, size), reduction)


@OPS.op(ALL_TO_ALL, pad=process_collectives_rules.all_to_all)
def all_to_all(x: jax.Array, groups: Ints, size: int, ranks: Ints) -> jax.Array:
    return collectives.all_to_all(x, _rows(groups, size))


@OPS.op(PERMUTE, pad=process_collectives_rules.collective)
def permute(x: jax.Array, targets: Ints, groups: Ints, size: int, ranks: Ints) -> jax.Array:
    pairs = tuple((row[i], row[target]) for row in _rows(groups, size) for i, target in enumerate(targets))
    return collectives.permute(x, pairs)


@OPS.op(BROADCAST, pad=process_collectives_rules.collective)
def broadcast(x: jax.Array, root: int, groups: Ints, size: int, ranks: Ints) -> jax.Array:
    return collectives.broadcast(x, _rows(groups, size), root)


def _rows(groups: Ints, size: int) -> Groups:
    return tuple(tuple(groups[i : i + size]) for i in range(0, len(groups), size))
