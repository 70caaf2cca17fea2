"""A sequence: the state of one request in the engine, and the row of a program's inputs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynaxla.serving.llm.detokenizer import Detokenizer
from dynaxla.serving.llm.generation import GenerationStream
from dynaxla.serving.llm.grammars import GrammarMatcher
from dynaxla.serving.llm.model_runner import RowInput
from dynaxla.serving.llm.requests import Delta, FinishReason, GeneratedToken, SamplingParams
from dynaxla.serving.request_queue import Request

_WORD = 1 << 32
_LEAST = 1e-30  # XLA takes the least floats for zero, by which no token would be left


@dataclass(eq=False, slots=True)
class TokenSequence(Request):
    """A request that was accepted. Only the worker uses it, but `cancelled` is set by any thread.

    Attributes:
        prompt, sampling: the tokens and the sampling params of the request.
        seed: of its random numbers.
        text: detokenizes its answer.
        matcher: the state of its grammar; None without one.
        stream: delivers its answer to the client.
        last_token_at: when it got its last tokens, in seconds of the engine's clock.
        slot: the slot it has; None if it has none.
        num_computed: tokens of the prompt whose keys and values are in the kv cache.
        tokens: of its answer.
        cancelled: whether the client has cancelled it.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    seed: int
    text: Detokenizer
    matcher: GrammarMatcher | None
    stream: GenerationStream = field(init=False)
    last_token_at: float | None = None
    slot: int | None = None
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < len(self.prompt)

    @property
    def tokens_in_cache(self) -> list[int]:
        """The tokens whose keys and values are in the slot: all but the newest one."""
        return [*self.prompt[: self.num_computed], *self.tokens[:-1]]

    @property
    def length(self) -> int:
        """The number of `tokens_in_cache`."""
        return self.num_computed + max(len(self.tokens) - 1, 0)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, biases or a grammar change its logits."""
        sampling = self.sampling
        penalties = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        return penalties or bool(sampling.logit_bias) or self.matcher is not None

    def forget(self) -> None:
        """Marks the contents of its slot as unknown."""
        self.num_computed, self.tokens = 0, []

    def count_left(self, max_seq_len: int) -> int:
        """Most tokens that the answer may still get."""
        return min(self.sampling.max_tokens, max_seq_len - len(self.prompt)) - len(self.tokens)

    def is_obsolete(self, now: float) -> bool:
        return self.cancelled or self.is_late(now)

    def row_input(self, *, left: int, count: int = 0) -> RowInput:
        """The inputs of its row in a call that computes `count` more tokens of its prompt, and then at most `left` new ones."""
        sampling, seed = self.sampling, self.seed % (_WORD * _WORD)
        ints = {
            "token": self.tokens[-1] if self.tokens else 0,
            "length": self.length,
            "left": left,
            "seed": seed % _WORD,
            "seed_high": seed // _WORD,
            "drawn": len(self.tokens),
            "top_k": min(sampling.top_k, _WORD // 2 - 1),
            "logprobs": 0 if sampling.logprobs is None else 1,
            "shaped": int(self.changes_logits),
            "ignore_eos": int(sampling.ignore_eos),
            "slot": self.slot or 0,
            "count": count,
        }
        floats = {
            "temperature": sampling.temperature,
            "top_p": max(sampling.top_p, _LEAST),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        return RowInput(ints, floats, None if self.matcher is None or not left else self.matcher.make_mask())

    def take(self, chosen: Sequence[GeneratedToken], max_seq_len: int, ends: frozenset[int]) -> Delta:
        """Appends new tokens up to the end of the answer. Returns what the client gets."""
        texts, taken, finish_reason = [], [], None
        for token in chosen:
            if token.token in ends and not self.sampling.ignore_eos:
                finish_reason = FinishReason.STOP
                break
            self.tokens.append(token.token)
            taken.append(token)
            texts.append(self.text.add(token.token))
            finish_reason = self._finish_reason(token.token, max_seq_len)
            if finish_reason is not None:
                break
        if finish_reason is not None:
            texts.append(self.text.finish())
        return Delta("".join(texts), tuple(taken), finish_reason)

    def _finish_reason(self, token: int, max_seq_len: int) -> FinishReason | None:
        if self.text.stopped or (self.matcher is not None and self.matcher.is_over_after(token)):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.count_left(max_seq_len) <= 0 else None
