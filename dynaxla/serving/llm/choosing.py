"""The choice of the next token, inside the program: per-row parameters, filters without a sort, draws that know no company.

What is not asked for by any row is not computed: each stage is a `cond`. Thresholds of top-k and top-p are found by bisection
over the bits of a float: XLA's CPU sorts a row of 49152 in 14 ms, and counts it 32 times in less than one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxla.serving.llm.requests import MOST_LOGPROBS

WHOLE = ("token", "length", "left", "seed", "seed_high", "drawn", "top_k", "logprobs", "shaped", "ignore_end", "slot", "count")
"""The columns of `Rows.whole`."""
REAL = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
"""The columns of `Rows.real`."""

_LEAST = -(1 << 31)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a call is told of its rows.

    Attributes:
        whole: int64 [rows, len(WHOLE)]: the last token and how many are in the cache, how many tokens may come, and so on.
        real: float32 [rows, len(REAL)].
        allowed: int32 [rows, words]: a bit per token that may come.
    """

    whole: Tensor
    real: Tensor
    allowed: Tensor

    # Copies: two views of one tensor are not let into a loop or a branch.

    def int_of(self, name: str) -> Tensor:
        return self.whole[:, WHOLE.index(name)].clone()

    def float_of(self, name: str) -> Tensor:
        return self.real[:, REAL.index(name)].clone()[:, None]


@dataclass(frozen=True, slots=True)
class Said:
    """What shapes the logits of rows [rows, vocabulary]: `prompt` (bool) and `counts` (int32) of tokens, `bias` (float32)."""

    prompt: Tensor
    counts: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens [rows], logarithms of their probabilities [rows], and the most probable [rows, MOST_LOGPROBS] and theirs."""

    tokens: Tensor
    logprobs: Tensor
    others: Tensor
    others_logprobs: Tensor


def choose(logits: Tensor, rows: Rows, drawn: Tensor, said: Said) -> Choice:
    """Chooses a token per row.

    Args:
        logits: [rows, vocabulary].
        rows: how.
        drawn: int64 [rows]: how many tokens the answer has already.
        said: what was said before.
    """
    raw = logits.float()
    shaped = _when(rows.int_of("shaped").any(), lambda x: _shape(x, rows, said), lambda x: x.clone(), raw)
    cold = rows.float_of("temperature") == 0
    tokens = _when(
        (~cold).any(),
        lambda x: torch.where(cold[:, 0], x.argmax(-1), _draw(x, rows, drawn)),
        lambda x: x.argmax(-1),
        shaped,
    )
    return Choice(tokens, *_logprobs(raw, tokens, rows))


def _when(condition: Tensor, then: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cond(condition, then, other, (x,))  # type: ignore[no-any-return]


def _shape(logits: Tensor, rows: Rows, said: Said) -> Tensor:
    """Bias, penalties, and what the grammar allows, in the rows that ask for any of it."""
    unshaped, logits = logits, logits + said.bias
    repetition = rows.float_of("repetition")
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(said.prompt | (said.counts > 0), penalized, logits)
    logits = logits - rows.float_of("presence") * (said.counts > 0) - rows.float_of("frequency") * said.counts
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    may = (rows.allowed[:, :, None] >> bits) & 1
    logits = logits.masked_fill(may.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
    return torch.where(rows.int_of("shaped")[:, None] > 0, logits, unshaped)


def _draw(logits: Tensor, rows: Rows, drawn: Tensor) -> Tensor:
    temperature = rows.float_of("temperature")
    warm = logits / torch.where(temperature == 0, 1.0, temperature)
    top_k, top_p, min_p = rows.int_of("top_k")[:, None], rows.float_of("top_p"), rows.float_of("min_p")
    filtered = (top_k > 0).any() | (top_p < 1).any() | (min_p > 0).any()
    warm = _when(filtered, lambda x: _filter(x, top_k, top_p, min_p), lambda x: x.clone(), warm)
    return (warm + _gumbel(rows.int_of("seed"), rows.int_of("seed_high"), drawn, logits.shape[1])).argmax(-1)


def _filter(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Minus infinity for what top-k, then top-p, then min-p leave out; equal logits stay or go together."""
    bits = logits.view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # int32 that compare as the floats do
    least = _largest(order, lambda at_least: at_least.sum(-1, keepdim=True) >= top_k)
    logits = logits.masked_fill((order < least) & (top_k > 0), float("-inf"))
    chances = logits.softmax(-1)
    # A mass of 1 may round to less: the sum of all is what 1 stands for.
    wanted = top_p * chances.sum(-1, keepdim=True)
    heaviest = _largest(
        order, lambda at_least: torch.where(at_least, chances, 0.0).sum(-1, keepdim=True) >= wanted
    )
    logits = logits.masked_fill((order < heaviest) & (top_p < 1), float("-inf"))
    floor = min_p * chances.amax(-1, keepdim=True)
    return logits.masked_fill(chances < floor, float("-inf"))


def _largest(order: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest int32 [rows, 1] at which `enough` of `order` still holds, which it must hold the less the larger."""
    found = torch.full_like(order[:, :1], _LEAST)
    found = torch.where(enough(order >= 0), torch.zeros_like(found), found)
    for bit in range(30, -1, -1):
        tried = found + (1 << bit)
        found = torch.where(enough(order >= tried), tried, found)
    return found


def _gumbel(seed: Tensor, seed_high: Tensor, drawn: Tensor, size: int) -> Tensor:
    """Gumbel noise [rows, size] of seeds and positions alone: whoever draws the same position gets the same numbers."""
    place = torch.arange(size, device=seed.device, dtype=torch.int32)[None]
    key = _mixed(_mixed(_mixed(seed.to(torch.int32)) ^ seed_high.to(torch.int32)) ^ drawn.to(torch.int32))[:, None]
    mixed = _mixed(_mixed(place * -1640531527 + key) ^ (key * 747796405 + 1013904223))
    even = ((mixed & 0x7FFFFF).float() + 0.5) * 2.0**-23  # exact, and neither 0 nor 1
    return -torch.log(-torch.log(even))


def _mixed(x: Tensor) -> Tensor:
    """murmur3's last steps: every bit of the result depends on every bit of x."""
    x = (x ^ _shifted(x, 16)) * -2048144789
    x = (x ^ _shifted(x, 13)) * -1028477387
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _logprobs(logits: Tensor, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    def told(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.log_softmax(-1)
        chosen, places, found = x.gather(1, tokens[:, None])[:, 0], [], []
        for _ in range(min(MOST_LOGPROBS, x.shape[1])):
            places.append(x.argmax(-1))
            found.append(x.amax(-1))
            x = x.scatter(1, places[-1][:, None], float("-inf"))
        missing = MOST_LOGPROBS - len(places)
        places += [torch.full_like(tokens, -1)] * missing
        found += [torch.full_like(chosen, float("-inf"))] * missing
        return chosen, torch.stack(places, 1), torch.stack(found, 1)

    def silent(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        none = x.new_zeros((x.shape[0], MOST_LOGPROBS))
        return x.new_zeros(x.shape[0]), none.to(torch.int64), none.clone()

    return torch.cond((rows.int_of("logprobs") > 0).any(), told, silent, (logits,))  # type: ignore[no-any-return]
