"""Grouped matrix products: each group's rows times the group's matrix, or products contracted over each group's rows.

Products of 16-bit floats are summed in float32 and rounded once, as in the other matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import segments as segments_rules
from dynaxla.custom_ops import internal
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops.matrix import wide_product
from dynaxla.ops.promotion import JNP_DTYPES, cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()


def check_grouped(node: torch.fx.Node) -> str | None:
    rows, matrices = tensor_of(node, "self"), tensor_of(node, "mat2")
    if (rows.dim(), matrices.dim()) != (2, 3) or argument(node, "offs") is None:
        return "only rows in groups times one matrix per group are compiled"
    if argument(node, "bias") is not None:
        return "a bias"
    return None if argument(node, "out_dtype") in (None, rows.dtype) else "a result in another dtype than the input's"


_MAX_WIDE_GROUPS, _MAX_WIDE_ROWS = 8, 64  # up to here one wide product is faster than a loop over tiles of the rows


@OPS.op(internal.GROUPED_PRODUCT, pad=segments_rules.grouped_product)
@OPS.op(
    aten._grouped_mm.default,
    dtypes={torch.int32, torch.float16, torch.bfloat16, torch.float32},
    check=check_grouped,
    pad=segments_rules.grouped_product,
    limits="rows in groups times one matrix per group (2-d, 3-d, offs), result in the input's dtype, no bias",
)
def grouped_product(
    rows: jax.Array, matrices: jax.Array, offs: jax.Array, bias: None = None, out_dtype: torch.dtype | None = None
) -> jax.Array:
    """Rows [s, k] times the matrices [g, k, n] of their groups, which end at `offs` [g]."""
    if rows.shape[0] == 0 or matrices.shape[0] == 0:
        return jnp.zeros((rows.shape[0], matrices.shape[2]), rows.dtype)
    few = rows.shape[0] <= _MAX_WIDE_ROWS and matrices.shape[0] <= _MAX_WIDE_GROUPS
    return cast((_masked_product if few else _tiled_product)(rows, matrices, offs), torch_dtype(rows))


def _masked_product(rows: jax.Array, matrices: jax.Array, offs: jax.Array) -> jax.Array:
    """One product of all rows: each row is repeated g times and set to zero except for its own group."""
    groups, depth, width = matrices.shape
    group = jnp.sum(jnp.arange(rows.shape[0])[:, None] >= offs, 1)
    own = group[:, None] == jnp.arange(groups)
    spread = jnp.where(own[:, :, None], rows[:, None], 0).reshape(rows.shape[0], groups * depth)
    return wide_product(spread, matrices.reshape(groups * depth, width))


def _tiled_product(rows: jax.Array, matrices: jax.Array, offs: jax.Array) -> jax.Array:
    """A loop over tiles of rows of one group: multiplies only rows in groups and reads only matrices of nonempty groups."""
    count = rows.shape[0]
    tiles = _Tiles.of(count, offs)
    padded = jnp.pad(rows, ((0, tiles.size), (0, 0)))  # the last tile may extend past the end

    def step(index: jax.Array, output: jax.Array) -> jax.Array:
        group, first, own = tiles.place(index)
        product = wide_product(lax.dynamic_slice_in_dim(padded, first, tiles.size), matrices[group])
        # Rows of a tile past its group's end become zero, or are overwritten by the next group's tile.
        return lax.dynamic_update_slice_in_dim(output, jnp.where(own[:, None], product, 0), first, 0)

    wide = JNP_DTYPES[opmath_dtype(torch_dtype(rows))]
    output = jnp.zeros((count + tiles.size, matrices.shape[2]), wide)
    return tiles.loop(step, output)[:count]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Groups of rows, split into tiles of `size` rows; a group's last tile may be shorter.

    Attributes:
        starts, stops: first row and end of each group.
        counts: number of tiles of each group.
        ends: index after each group's last tile.
    """

    size: int
    starts: jax.Array
    stops: jax.Array
    counts: jax.Array
    ends: jax.Array

    @classmethod
    def of(cls, rows: int, offs: jax.Array) -> _Tiles:
        size = min(32, max(8, 1 << (rows // offs.shape[0]).bit_length()))
        starts = jnp.concatenate([jnp.zeros(1, offs.dtype), offs[:-1]])
        counts = (offs - starts + size - 1) // size
        return cls(size, starts, offs, counts, jnp.cumsum(counts))

    def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A tile's group, its first row, and which of its rows belong to the group."""
        group = jnp.sum(index >= self.ends)
        first = self.starts[group] + (index - self.ends[group] + self.counts[group]) * self.size
        return group, first, first + jnp.arange(self.size, dtype=self.starts.dtype) < self.stops[group]

    def loop(self, step: Callable[[jax.Array, jax.Array], jax.Array], output: jax.Array) -> jax.Array:
        filled: jax.Array = lax.fori_loop(jnp.zeros((), self.ends.dtype), self.ends[-1], step, output)
        return filled


@OPS.op(internal.GROUP_PRODUCTS, pad=segments_rules.group_products)
def group_products(left: jax.Array, right: jax.Array, offs: jax.Array) -> jax.Array:
    """The products [g, k, n] of left [s, k] and right [s, n], contracted over each group's rows."""
    shape = (offs.shape[0], left.shape[1], right.shape[1])
    if 0 in (left.shape[0], offs.shape[0]):
        return jnp.zeros(shape, left.dtype)
    few = left.shape[0] <= _MAX_WIDE_ROWS and offs.shape[0] <= _MAX_WIDE_GROUPS
    return cast((_masked_products if few else _tiled_products)(left, right, offs), torch_dtype(left))


def _masked_products(left: jax.Array, right: jax.Array, offs: jax.Array) -> jax.Array:
    group = jnp.sum(jnp.arange(left.shape[0])[:, None] >= offs, 1)
    own = group[:, None] == jnp.arange(offs.shape[0])
    # [g, s, ...]: masked per group, so that NaN and infinities stay in their group.
    left, right = (jnp.where(own.T[:, :, None], x, 0) for x in (left, right))
    return wide_product(left.swapaxes(1, 2), right)


def _tiled_products(left: jax.Array, right: jax.Array, offs: jax.Array) -> jax.Array:
    tiles = _Tiles.of(left.shape[0], offs)
    left, right = (jnp.pad(x, ((0, tiles.size), (0, 0))) for x in (left, right))

    def step(index: jax.Array, output: jax.Array) -> jax.Array:
        group, first, own = tiles.place(index)
        parts = (lax.dynamic_slice_in_dim(x, first, tiles.size) for x in (left, right))
        a, b = (jnp.where(own[:, None], x, 0) for x in parts)
        return output.at[group].add(wide_product(a.T, b))

    wide = JNP_DTYPES[opmath_dtype(torch_dtype(left))]
    return tiles.loop(step, jnp.zeros((offs.shape[0], left.shape[1], right.shape[1]), wide))
