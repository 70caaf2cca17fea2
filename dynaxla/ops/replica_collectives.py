"""Collectives as JAX functions: each replica of a program calls them with its own operand.

`groups` are the replicas that compute together, by their numbers, all groups of the same size; a replica's place in its group
is its rank there. What is moved is moved bit by bit; what is reduced is reduced in its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaxla.errors import OptionError
from dynaxla.runtime import xla
from dynaxla.types import Groups

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""As torch names them in functional collectives."""

_BITWISE = {"band": jnp.bitwise_and, "bor": jnp.bitwise_or, "bxor": jnp.bitwise_xor}
_OF_BOOLS = {"sum": "max", "avg": "max", "product": "min", "band": "min", "bor": "max", "max": "max", "min": "min"}
_OPERATIONS = {"sum": "AddOp", "product": "MulOp", "min": "MinOp", "max": "MaxOp"}


def all_reduce(x: jax.Array, groups: Groups, reduction: str) -> jax.Array:
    """The reduction of the operands of a replica's group, in each of them.

    Raises:
        OptionError: the dtype has no such reduction.
    """
    size = len(groups[0])
    _check_reduction(x.dtype, reduction)
    if reduction in _BITWISE and not (x.dtype == bool and reduction in _OF_BOOLS):
        gathered = all_gather(x[None], groups)
        return reduce(_BITWISE[reduction], [gathered[i] for i in range(size)])
    if x.dtype == bool:
        return all_reduce(x.astype(jnp.uint8), groups, _OF_BOOLS[reduction]).astype(bool)
    reduced = _reduce(x, groups, "sum" if reduction == "avg" else reduction)
    return _divide(reduced, size) if reduction == "avg" else reduced


def reduce_scatter(x: jax.Array, groups: Groups, reduction: str) -> jax.Array:
    """A replica's piece, along dim 0, of the reduction of its group's operands.

    Raises:
        OptionError: the dtype has no such reduction.
    """
    size = len(groups[0])
    _check_reduction(x.dtype, reduction)
    if reduction in _BITWISE or x.dtype == bool:
        pieces = all_to_all(x, groups).reshape(size, x.shape[0] // size, *x.shape[1:])
        if x.dtype == bool and reduction in _OF_BOOLS:
            return (jnp.any if _OF_BOOLS[reduction] == "max" else jnp.all)(pieces, axis=0)
        return reduce(_BITWISE[reduction], [pieces[i] for i in range(size)])
    scattered = _scatter(x, groups, "sum" if reduction == "avg" else reduction)
    return _divide(scattered, size) if reduction == "avg" else scattered


def all_gather(x: jax.Array, groups: Groups) -> jax.Array:
    """The operands of a replica's group, one after the other along dim 0."""
    return _moved(x, lambda bits: _primitives()["all_gather"](bits, groups=groups))


def all_to_all(x: jax.Array, groups: Groups) -> jax.Array:
    """Of each operand of the group the piece, along dim 0, that is the replica's; one after the other."""
    return _moved(x, lambda bits: _primitives()["all_to_all"](bits, groups=groups))


def broadcast(x: jax.Array, groups: Groups, root: int) -> jax.Array:
    """The operand of the group's replica `root`."""
    # A sum of integers of which all but one are zero is exact for every dtype. XLA's CPU has no broadcast.
    mine = rank_in_group(groups) == root
    return _moved(x, lambda bits: _reduce(jnp.where(mine, bits, jnp.zeros_like(bits)), groups, "sum"))


def scatter(x: jax.Array, groups: Groups, root: int) -> jax.Array:
    """A replica's piece, along dim 0, of the operand of the group's replica `root`."""
    mine = rank_in_group(groups) == root
    return _moved(x, lambda bits: _scatter(jnp.where(mine, bits, jnp.zeros_like(bits)), groups, "sum"))


def permute(x: jax.Array, pairs: Groups) -> jax.Array:
    """The operand of the replica that sends to this one, by (source, target); zeros where none does."""
    return _moved(x, lambda bits: _primitives()["permute"](bits, pairs=pairs))


def rank_in_group(groups: Groups) -> jax.Array:
    """A replica's place in its group."""
    places = np.zeros(1 + max(map(max, groups)), np.int32)
    for group in groups:
        places[list(group)] = range(len(group))
    number = _primitives()["replica_id"](jnp.zeros((), jnp.uint32))
    return jnp.asarray(places)[number.astype(jnp.int32)]


def make_work() -> jax.Array:
    """A number that takes a microsecond to compute: PJRT's CPU client runs what takes less in the caller's thread, which would
    then wait for the other processes."""
    number = _primitives()["replica_id"](jnp.zeros((), jnp.uint32))
    return jnp.max(jax.lax.iota(jnp.uint32, 4096) ^ number)


def _check_reduction(dtype: Any, reduction: str) -> None:
    refused = reduction not in REDUCTIONS
    refused |= reduction in _BITWISE and not (jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.integer))
    refused |= reduction in ("min", "max") and jnp.issubdtype(dtype, jnp.complexfloating)
    if refused:
        raise OptionError(f"there is no reduction {reduction!r} of {dtype}", f"reductions: {', '.join(REDUCTIONS)}")


def _divide(x: jax.Array, size: int) -> jax.Array:
    return jax.lax.div(x, jnp.asarray(size, x.dtype))


def _reduce(x: jax.Array, groups: Groups, reduction: str) -> jax.Array:
    return _primitives()["all_reduce"](x, groups=groups, reduction=reduction)  # type: ignore[no-any-return]


def _scatter(x: jax.Array, groups: Groups, reduction: str) -> jax.Array:
    return _primitives()["reduce_scatter"](x, groups=groups, reduction=reduction)  # type: ignore[no-any-return]


def _moved(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """What is moved of the bits of an array, as integers."""
    if x.dtype == bool:
        return move(x.astype(jnp.uint8)).astype(bool)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        real = jnp.stack([x.real, x.imag], axis=-1)
        moved = _moved(real, move)
        return jax.lax.complex(moved[..., 0], moved[..., 1])
    if jnp.issubdtype(x.dtype, jnp.integer):
        return move(x)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(move(bits), x.dtype)


@cache
def _primitives() -> dict[str, Callable[..., Any]]:
    def rows(shape: tuple[int, ...], count: float) -> tuple[int, ...]:
        return (math.floor(shape[0] * count), *shape[1:])

    made: dict[str, tuple[Callable[..., tuple[int, ...]], Callable[..., Any]]] = {
        "all_reduce": (lambda shape, groups, reduction: shape, _emit_all_reduce),
        "all_gather": (lambda shape, groups: rows(shape, len(groups[0])), _emit_all_gather),
        "reduce_scatter": (
            lambda shape, groups, reduction: (shape[0] // len(groups[0]), *shape[1:]),
            _emit_reduce_scatter,
        ),
        "all_to_all": (lambda shape, groups: shape, _emit_all_to_all),
        "permute": (lambda shape, pairs: shape, _emit_permute),
        "replica_id": (lambda shape: shape, _emit_replica_id),
    }
    return {
        name: _unless_empty(shape, xla.new_primitive(f"dynaxla_{name}", shape, emit))
        for name, (shape, emit) in made.items()
    }


def _unless_empty(shape: Callable[..., tuple[int, ...]], primitive: Callable[..., Any]) -> Callable[..., Any]:
    """The primitive, which StableHLO refuses of no elements."""

    def call(x: jax.Array, **parameters: Any) -> Any:
        return primitive(x, **parameters) if x.size else jnp.zeros(shape(x.shape, **parameters), x.dtype)

    return call


def _matrix(groups: Groups) -> Any:
    return xla.mlir().ir.DenseElementsAttr.get(np.array(groups, np.int64))


def _add_reducer(operation: Any, type: Any, reduction: str) -> None:
    bindings = xla.mlir()
    scalar = bindings.ir.RankedTensorType.get((), type.element_type)
    block = operation.regions[0].blocks.append(scalar, scalar)
    with bindings.ir.InsertionPoint(block):
        made = getattr(bindings.stablehlo, _OPERATIONS[reduction])(*block.arguments)
        bindings.stablehlo.return_([made.result])


def _emit_all_reduce(type: Any, operand: Any, *, groups: Groups, reduction: str) -> Any:
    made = xla.mlir().stablehlo.AllReduceOp([type], [operand], replica_groups=_matrix(groups))
    _add_reducer(made, type, reduction)
    return made.results[0]


def _emit_reduce_scatter(type: Any, operand: Any, *, groups: Groups, reduction: str) -> Any:
    made = xla.mlir().stablehlo.ReduceScatterOp(type, operand, 0, _matrix(groups))
    _add_reducer(made, type, reduction)
    return made.results[0]


def _emit_all_gather(type: Any, operand: Any, *, groups: Groups) -> Any:
    return xla.mlir().stablehlo.AllGatherOp([type], [operand], 0, _matrix(groups)).results[0]


def _emit_all_to_all(type: Any, operand: Any, *, groups: Groups) -> Any:
    size = len(groups[0])
    return xla.mlir().stablehlo.AllToAllOp([operand], 0, 0, size, _matrix(groups)).results[0]


def _emit_permute(type: Any, operand: Any, *, pairs: Groups) -> Any:
    return xla.mlir().stablehlo.CollectivePermuteOp(operand, _matrix(pairs)).results[0]


def _emit_replica_id(type: Any, operand: Any) -> Any:
    return xla.mlir().stablehlo.ReplicaIdOp().result
