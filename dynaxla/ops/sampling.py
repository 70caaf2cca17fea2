"""Sampling of a language model's next token: parameters per row, filters without a sort, noise independent of the batch.

It is a custom operator, as Dynamo took longer to capture it as a torch graph than two layers of a model. Steps that no row
asks for are skipped. The thresholds of top-k and top-p are found by bisection over the bits of a float: XLA's CPU sorts a
row of 49152 in 14 ms, and counts it 32 times in less than 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import Tensor

from dynaxla.ops.record import OpFamily

OPS = OpFamily()

MAX_LOGPROBS = 20
"""The number of most probable tokens that are returned per token."""

INT_COLUMNS = (
    "token",
    "length",
    "left",
    "seed",
    "seed_high",
    "drawn",
    "top_k",
    "logprobs",
    "shaped",
    "ignore_eos",
    "slot",
    "count",
)
"""The columns of the rows' integer parameters, int64."""
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The columns of the rows' float parameters, float32."""

_LEAST = -(1 << 31)
_DTYPES = (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
Row = Callable[[str], Array]
Chosen = tuple[Array, Array, Array, Array]


@torch.library.custom_op("dynaxla::choose", mutates_args=())
def sample_tokens(
    logits: Tensor,
    ints: Tensor,
    floats: Tensor,
    allowed: Tensor,
    prompt: Tensor,
    counts: Tensor,
    bias: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sample_tokens_jax` with torch tensors."""
    arguments = (logits, ints, floats, allowed, prompt, counts, bias, step)
    with jax.enable_x64(True):
        found = sample_tokens_jax(*(jnp.asarray(tensor.cpu().numpy()) for tensor in arguments))
    return tuple(torch.from_numpy(jax.device_get(array).copy()).to(logits.device) for array in found)  # type: ignore[return-value]


@sample_tokens.register_fake
def _(logits: Tensor, *_: Any) -> Sequence[Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty((rows, MAX_LOGPROBS), dtype=torch.int64),
        logits.new_empty((rows, MAX_LOGPROBS), dtype=torch.float32),
    )


CHOOSE = torch.ops.dynaxla.choose.default


@OPS.op(CHOOSE, dtypes=_DTYPES)
def sample_tokens_jax(
    logits: Array, ints: Array, floats: Array, allowed: Array, prompt: Array, counts: Array, bias: Array, step: Array
) -> Chosen:
    """Samples a token per row.

    Args:
        logits: [rows, vocabulary].
        ints, floats: parameters [rows, columns]; the columns are `INT_COLUMNS` and `FLOAT_COLUMNS`.
        allowed: int32 [rows, words]: one bit per token, 1 if the grammar allows it.
        prompt, counts, bias: [rows, vocabulary] bool, int32, float32: whether the prompt has the token, the token's count in
            the answer, the logit bias.
        step: int64 []: number of tokens sampled since `drawn` was set.

    Returns:
        Tokens int64 [rows] (the vocabulary's size if logits are NaN); their log-probabilities float32 [rows]; the most
        probable tokens int64 [rows, MOST_LOGPROBS] and their log-probabilities float32. The last three are zeros if no row
        asks for logprobs.
    """

    def column(name: str) -> Array:
        return (ints[:, INT_COLUMNS.index(name)] if name in INT_COLUMNS else floats[:, FLOAT_COLUMNS.index(name)])[
            :, None
        ]

    raw = logits.astype(jnp.float32)

    def shape() -> Array:
        wanted = column("shaped") > 0
        return lax.cond(  # type: ignore[no-any-return]
            wanted.any(),
            lambda: jnp.where(wanted, _apply_penalties(raw, column, allowed, prompt, counts, bias), raw),
            lambda: raw,
        )

    cold = column("temperature") == 0

    def choose_warm() -> Array:
        shaped = shape()
        drawn = lax.cond((~cold).any(), lambda: _draw(shaped, column, step), lambda: _first_largest(shaped))
        return jnp.where(cold[:, 0], _first_largest(shaped), drawn)

    # Most often all rows take the argmax of the raw logits, which needs no copy of them.
    plain = cold.all() & (column("shaped") == 0).all()
    tokens = lax.cond(plain, lambda: _first_largest(raw), choose_warm)
    return tokens, *lax.cond(
        (column("logprobs") > 0).any(), lambda: _top_logprobs(raw, tokens), lambda: _no_logprobs(raw)
    )


def _first_largest(x: Array) -> Array:
    """The first index [rows] of the maximum of x [rows, n]; n for a row with NaN."""
    along = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x == x.max(-1, keepdims=True), along, x.shape[1]), -1).astype(jnp.int64)


def _apply_penalties(logits: Array, row: Row, allowed: Array, prompt: Array, counts: Array, bias: Array) -> Array:
    """Applies bias, penalties, and the grammar's mask to the logits."""
    logits, repetition = logits + bias, row("repetition_penalty")
    penalized = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(prompt | (counts > 0), penalized, logits)
    logits = logits - row("presence_penalty") * (counts > 0) - row("frequency_penalty") * counts
    may = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(may.reshape(may.shape[0], -1)[:, : logits.shape[1]] > 0, logits, -jnp.inf)


def _draw(logits: Array, row: Row, step: Array) -> Array:
    temperature = row("temperature")
    warm = logits / jnp.where(temperature == 0, jnp.float32(1), temperature)
    filtered = (row("top_k") > 0).any() | (row("top_p") < 1).any() | (row("min_p") > 0).any()
    warm = lax.cond(filtered, lambda: _filter(warm, row), lambda: warm)
    return _first_largest(warm + _gumbel(row, step, logits.shape[1]))


def _filter(logits: Array, row: Row) -> Array:
    """Sets the logits that top-k, then top-p, then min-p exclude to minus infinity; equal logits are treated alike."""
    top_k, top_p, min_p = row("top_k"), row("top_p"), row("min_p")
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # int32 in the order of the floats
    least = _bisect_threshold(order, lambda at_least: at_least.sum(-1, keepdims=True) >= top_k)
    logits = jnp.where((order < least) & (top_k > 0), -jnp.inf, logits)
    chances = jax.nn.softmax(logits, axis=-1)
    # Probabilities may sum to less than 1 by rounding, so top_p is relative to their sum.
    wanted = top_p * chances.sum(-1, keepdims=True)
    heaviest = _bisect_threshold(
        order, lambda at_least: jnp.where(at_least, chances, 0).sum(-1, keepdims=True) >= wanted
    )
    logits = jnp.where((order < heaviest) & (top_p < 1), -jnp.inf, logits)
    return jnp.where(chances < min_p * chances.max(-1, keepdims=True), -jnp.inf, logits)


def _bisect_threshold(order: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest int32 threshold [rows, 1] for which `enough(order >= threshold)`, which must be monotone; by bisection."""

    def halve(turn: Any, found: Array) -> Array:
        tried = found + lax.shift_left(jnp.int32(1), jnp.int32(30) - turn.astype(jnp.int32))
        return jnp.where(enough(order >= tried), tried, found)

    found = jnp.where(enough(order >= 0), jnp.int32(0), jnp.int32(_LEAST))
    return lax.fori_loop(jnp.int32(0), jnp.int32(31), halve, found)  # type: ignore[no-any-return]


def _gumbel(row: Row, step: Array, size: int) -> Array:
    """Gumbel noise [rows, size] that depends on a row's seed and position only, not on the other rows."""
    drawn = (row("drawn") + step).astype(jnp.uint32)
    seeds = [row(name).astype(jnp.uint32) for name in ("seed", "seed_high")]
    key = _mix_bits(_mix_bits(_mix_bits(seeds[0]) ^ seeds[1]) ^ drawn)
    place = jnp.arange(size, dtype=jnp.uint32)[None]
    mixed = _mix_bits(
        _mix_bits(place * jnp.uint32(2654435769) + key) ^ (key * jnp.uint32(747796405) + jnp.uint32(1013904223))
    )
    even = ((mixed >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)  # exact, and neither 0 nor 1
    return -jnp.log(-jnp.log(even))


def _mix_bits(x: Array) -> Array:
    """The finalizer of murmur3: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _top_logprobs(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    along = jnp.arange(logits.shape[0])

    def take(n: Any, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, most, theirs = so_far
        best = _first_largest(rest)
        return (
            rest.at[along, best].set(-jnp.inf),
            most.at[:, n].set(best),
            theirs.at[:, n].set(rest.max(-1)),
        )

    _, most, theirs = _no_logprobs(logits)
    _, most, theirs = lax.fori_loop(0, min(MAX_LOGPROBS, logits.shape[1]), take, (logprobs, most, theirs))
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], most, theirs


def _no_logprobs(logits: Array) -> tuple[Array, Array, Array]:
    shape = (logits.shape[0], MAX_LOGPROBS)
    return (
        jnp.zeros(shape[0], jnp.float32),
        jnp.zeros(shape, jnp.int64),
        jnp.zeros(shape, jnp.float32),
    )
