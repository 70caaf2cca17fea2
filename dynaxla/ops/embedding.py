"""Embeddings and embedding bags.

An index out of range, for which torch raises, gives NaN where values are not checked (passes/value_checks.py): a program cannot
raise, and must not return a plausible number.
"""

from __future__ import annotations

import operator
from functools import partial

import jax.numpy as jnp
import torch
from jax import Array, lax

from dynaxla.bucketing.pad_rules import gradients as gradients_rules
from dynaxla.bucketing.pad_rules import indexing as indexing_rules
from dynaxla.bucketing.pad_rules import segments as segments_rules
from dynaxla.custom_ops.schema import argument
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.dtypes import STORED
from dynaxla.ops.eager_errors import check_all, check_inexact, check_rank, check_rows
from dynaxla.ops.promotion import cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()
OUT_OF_RANGE = "an index out of range gives NaN where values are not checked"
_BY_FREQUENCY = "`scale_grad_by_freq` divides by each row's own count; torch's CPU kernel takes that of another row"


def check_dense(node: torch.fx.Node) -> str | None:
    """Refuses sparse gradients."""
    return "a sparse gradient" if argument(node, "sparse") else None


def check_last_offset(node: torch.fx.Node) -> str | None:
    """Refuses calls with an offset behind the last bag whose last two results are read: torch's fake kernel gives them other
    sizes than eager."""
    reads = (user.args[1] for user in node.users if user.target is operator.getitem and user.users)
    is_refused = argument(node, "include_last_offset") and any(place in (2, 3) for place in reads)
    return "the last two results, with an offset behind the last bag" if is_refused else None


SUM, MEAN, MAX = range(3)  # torch's numbers of the bag reductions


@OPS.op(aten.embedding.default, dtypes=STORED, check=check_rows, pad=indexing_rules.embedding, limits=OUT_OF_RANGE)
def embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    del padding_idx, scale_grad_by_freq, sparse  # used by the gradient only
    return _rows(weight, indices)


@OPS.op(
    aten.embedding_renorm.default, check=check_all(check_inexact("self"), check_rank("self", 2)), limits=OUT_OF_RANGE
)
def embedding_renorm(weight: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """Scales the chosen rows whose norm exceeds the limit down to it."""
    chosen = jnp.zeros(weight.shape[0], bool).at[indices.reshape(-1)].set(True)
    rows = _wide(weight)
    lengths = jnp.linalg.norm(rows, norm_type, axis=1)
    factors = jnp.where(chosen & (lengths > max_norm), max_norm / (lengths + 1e-7), 1)
    return (rows * factors[:, None]).astype(weight.dtype)


@OPS.op(
    aten.embedding_dense_backward.default,
    pad=gradients_rules.embedding_backward,
    limits=OUT_OF_RANGE,
    as_aten=decompose,
)
def embedding_dense_backward(
    grad_output: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    rows = indices.reshape(-1)
    grads = _wide(grad_output).reshape(rows.shape[0], grad_output.shape[-1])
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, grads.dtype).at[rows].add(1)
        grads = grads / counts[rows][:, None]
    kept = jnp.where((rows == padding_idx)[:, None], 0, grads)

    if grads.dtype == grad_output.dtype or not 0 < rows.size < num_weights:
        return _add_rows(num_weights, grad_output.dtype, rows, kept)
    add_all, add_once = (partial(add, num_weights, grad_output.dtype) for add in (_add_rows, sum_equal_rows))
    return lax.platform_dependent(rows, kept, tpu=add_once, default=add_all)  # type: ignore[no-any-return]


def _add_rows(count: int, dtype: jnp.dtype, rows: Array, values: Array) -> Array:
    """A table [count, n] of zeros, to whose rows [m] the values [m, n] are added."""
    return jnp.zeros((count, values.shape[1]), values.dtype).at[rows].add(values).astype(dtype)


def sum_equal_rows(count: int, dtype: jnp.dtype, rows: Array, values: Array) -> Array:
    """As `_add_rows`, by sums [m, n] of the values of equal rows: no whole table in the wider dtype of the values."""
    rows = jnp.where(rows < 0, rows + count, rows)  # as indices are read
    order = jnp.argsort(rows)
    rows, values = rows[order], values[order]
    place = jnp.cumsum(jnp.append(jnp.zeros(1, bool), rows[1:] != rows[:-1]), dtype=jnp.int32)
    sums = jnp.zeros_like(values).at[place].add(values, indices_are_sorted=True).astype(dtype)
    own = jnp.full(rows.shape, count, rows.dtype).at[place].min(rows, indices_are_sorted=True)
    return jnp.zeros((count, values.shape[1]), dtype).at[own].set(sums, mode="drop")


@OPS.op(aten._embedding_bag.default, check=check_rows, pad=segments_rules.embedding_bag, limits=OUT_OF_RANGE)
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """Returns (output [bags, size], bag of every index, size of every bag, chosen rows of the max).

    The last three are for the backward pass; if the mode needs none, they have the shapes of torch's meta function.
    """
    del scale_grad_by_freq, sparse
    bags = offsets.shape[0] - int(include_last_offset)
    bag = _bag_of_each(indices, offsets[:bags])
    counted = (indices != padding_idx) if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    sizes = jnp.zeros(bags, offsets.dtype).at[bag].add(counted.astype(offsets.dtype))
    rows = _wide(_rows(weight, indices))
    if per_sample_weights is not None:
        rows = rows * cast(per_sample_weights, torch_dtype(rows))[:, None]
    if mode == MAX:
        output, chosen = _max_per_bag(rows, counted, indices.astype(offsets.dtype), bag, sizes)
        return output.astype(weight.dtype), bag, sizes, chosen
    total = jnp.zeros((bags, weight.shape[1]), rows.dtype).at[bag].add(jnp.where(counted[:, None], rows, 0))
    if mode == MEAN:
        total = total / jnp.maximum(sizes, 1).astype(rows.dtype)[:, None]
        return total.astype(weight.dtype), bag, sizes, sizes
    is_fast = padding_idx < 0 and weight.dtype in (jnp.float32, jnp.float16)
    return total.astype(weight.dtype), bag[:0] if is_fast else bag, sizes * 0, sizes * 0


@OPS.op(
    aten._embedding_bag_forward_only.default,
    check=check_all(check_rows, check_last_offset),
    pad=segments_rules.embedding_bag,
    limits=OUT_OF_RANGE,
)
def embedding_bag_forward_only(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    output, bag, sizes, chosen = embedding_bag(
        weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
    )
    padded = jnp.pad(sizes, (0, offsets.shape[0] - sizes.shape[0]))
    return output, bag, padded, chosen if mode == MAX else sizes


@OPS.op(
    aten._embedding_bag_dense_backward.default,
    pad=segments_rules.embedding_bag_backward,
    limits=f"{OUT_OF_RANGE}; {_BY_FREQUENCY}",
)
def embedding_bag_dense_backward(
    grad: Array,
    indices: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    wide = _wide(grad)
    table = jnp.zeros((num_weights, grad.shape[1]), wide.dtype)
    if mode == MAX:
        columns = jnp.arange(grad.shape[1])[None, :]
        used = jnp.where((bag_size[: grad.shape[0]] > 0)[:, None], wide, 0)
        return table.at[maximum_indices, columns].add(used).astype(grad.dtype)
    grads = wide[offset2bag]
    if per_sample_weights is not None:
        grads = grads * cast(per_sample_weights, torch_dtype(wide))[:, None]
    if mode == MEAN:
        grads = grads / jnp.maximum(bag_size, 1)[offset2bag].astype(wide.dtype)[:, None]
    if scale_grad_by_freq:
        grads = grads / jnp.zeros(num_weights, wide.dtype).at[indices].add(1)[indices][:, None]
    kept = jnp.where((indices == padding_idx)[:, None], 0, grads)
    return table.at[indices].add(kept).astype(grad.dtype)


@OPS.op(
    aten._embedding_bag_backward.default,
    check=check_dense,
    pad=segments_rules.embedding_bag_backward,
    limits=f"no sparse gradient; {_BY_FREQUENCY}",
)
def embedding_bag_backward(
    grad: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    del sparse  # the op's record refuses it
    bag = offset2bag if offset2bag.shape[0] else _bag_of_each(indices, offsets[: grad.shape[0]])
    settings = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    return embedding_bag_dense_backward(grad, indices, bag, bag_size, maximum_indices, *settings)


@OPS.op(
    aten._embedding_bag_per_sample_weights_backward.default,
    pad=segments_rules.embedding_bag_per_sample_weights_backward,
    limits=OUT_OF_RANGE,
)
def embedding_bag_per_sample_weights_backward(
    grad: Array, weight: Array, indices: Array, offsets: Array, offset2bag: Array, mode: int, padding_idx: int = -1
) -> Array:
    del mode  # torch has per-sample weights for sums only
    bag = offset2bag if offset2bag.shape[0] else _bag_of_each(indices, offsets[: grad.shape[0]])
    products = jnp.sum(_wide(grad)[bag] * _wide(_rows(weight, indices)), -1)
    return jnp.where(indices == padding_idx, 0, products).astype(grad.dtype)


def _bag_of_each(indices: Array, starts: Array) -> Array:
    """The bag of each of `indices` [n], from the bags' starts [bags]."""
    places = jnp.arange(indices.shape[0], dtype=starts.dtype)
    return jnp.searchsorted(starts, places, side="right").astype(starts.dtype) - 1


def _rows(weight: Array, indices: Array) -> Array:
    rows = weight.at[indices].get(mode="fill", fill_value=_poison(weight), wrap_negative_indices=False)
    return jnp.asarray(rows)


def _poison(weight: Array) -> float | int:
    return float("nan") if jnp.issubdtype(weight.dtype, jnp.inexact) else 0


def _wide(x: Array) -> Array:
    return cast(x, opmath_dtype(torch_dtype(x)))


def _max_per_bag(rows: Array, counted: Array, indices: Array, bag: Array, sizes: Array) -> tuple[Array, Array]:
    """The largest value per bag and column, and its table row (the first of equal values)."""
    bags, count = sizes.shape[0], rows.shape[0]
    masked = jnp.where(counted[:, None], rows, -jnp.inf)
    top = jnp.full((bags, rows.shape[1]), -jnp.inf, rows.dtype).at[bag].max(masked)
    places = jnp.where((masked == top[bag]) & counted[:, None], jnp.arange(count)[:, None], count)
    first = jnp.full(top.shape, count, places.dtype).at[bag].min(places)
    filled = (sizes > 0)[:, None]
    chosen = (
        jnp.where(filled & (first < count), indices[jnp.minimum(first, max(count - 1, 0))], 0) if count else first * 0
    )
    return jnp.where(filled, top, 0), chosen.astype(indices.dtype)
