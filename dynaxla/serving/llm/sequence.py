"""A request on its way: what is asked of its row, and what its tokens come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynaxla.serving.llm.detokenizer import TextStream
from dynaxla.serving.llm.generation import Answering
from dynaxla.serving.llm.grammars import Matcher
from dynaxla.serving.llm.model_runner import Ask
from dynaxla.serving.llm.requests import Chosen, Ended, Piece, Sampling
from dynaxla.serving.request_queue import Request

_WORD = 1 << 32
_LEAST = 1e-30  # XLA takes the least floats for zero, by which no token would be left


@dataclass(eq=False, slots=True)
class Running(Request):
    """A request that was accepted. The worker's own, but for `cancelled`, which any thread sets.

    Attributes:
        prompt, sampling: what was asked for.
        seed: of its draws.
        text: its answer's text, as it comes.
        matcher: its way along its grammar.
        answering: the caller's end.
        told_at: when it was given tokens last.
        slot: while it has one.
        filled: tokens of the prompt that are in the cache.
        tokens: of the answer, so far.
    """

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    text: TextStream
    matcher: Matcher | None
    answering: Answering = field(init=False)
    told_at: float | None = None
    slot: int | None = None
    filled: int = 0
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def is_prefilling(self) -> bool:
        return self.filled < len(self.prompt)

    @property
    def held(self) -> list[int]:
        """Tokens whose keys and values are in the slot: the newest token's are not yet."""
        return [*self.prompt[: self.filled], *self.tokens[:-1]]

    @property
    def length(self) -> int:
        """How many these are."""
        return self.filled + max(len(self.tokens) - 1, 0)

    @property
    def is_shaped(self) -> bool:
        """Whether its logits are changed before the choice."""
        how = self.sampling
        penalties = how.repetition_penalty != 1 or how.presence_penalty != 0 or how.frequency_penalty != 0
        return penalties or bool(how.logit_bias) or self.matcher is not None

    def forget(self) -> None:
        """What its slot holds is not known."""
        self.filled, self.tokens = 0, []

    def left(self, room: int) -> int:
        """How many more tokens it may have."""
        return min(self.sampling.max_tokens, room - len(self.prompt)) - len(self.tokens)

    def is_obsolete(self, now: float) -> bool:
        return self.cancelled or self.is_late(now)

    def ask(self, *, left: int, count: int = 0) -> Ask:
        """What is asked of its row: up to `left` tokens, behind `count` more ones of its prompt."""
        how, seed = self.sampling, self.seed % (_WORD * _WORD)
        whole = {
            "token": self.tokens[-1] if self.tokens else 0,
            "length": self.length,
            "left": left,
            "seed": seed % _WORD,
            "seed_high": seed // _WORD,
            "drawn": len(self.tokens),
            "top_k": min(how.top_k, _WORD // 2 - 1),
            "logprobs": 0 if how.logprobs is None else 1,
            "shaped": int(self.is_shaped),
            "ignore_end": int(how.ignore_end),
            "slot": self.slot or 0,
            "count": count,
        }
        real = {
            "temperature": how.temperature,
            "top_p": max(how.top_p, _LEAST),
            "min_p": how.min_p,
            "repetition": how.repetition_penalty,
            "presence": how.presence_penalty,
            "frequency": how.frequency_penalty,
        }
        return Ask(whole, real, None if self.matcher is None or not left else self.matcher.allowed())

    def take(self, chosen: Sequence[Chosen], room: int, ends: frozenset[int]) -> Piece:
        """Goes on by new tokens; those behind the end are left out."""
        texts, taken, ended = [], [], None
        for token in chosen:
            if token.token in ends and not self.sampling.ignore_end:
                ended = Ended.STOP
                break
            self.tokens.append(token.token)
            taken.append(token)
            texts.append(self.text.add(token.token))
            ended = self._ended(token.token, room)
            if ended is not None:
                break
        if ended is not None:
            texts.append(self.text.finish())
        return Piece("".join(texts), tuple(taken), ended)

    def _ended(self, token: int, room: int) -> Ended | None:
        if self.text.stopped or (self.matcher is not None and self.matcher.is_over_after(token)):
            return Ended.STOP
        return Ended.LENGTH if self.left(room) <= 0 else None
