"""The interface of a language model's engine: requests, answers, and the protocols that an HTTP server needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from dynaxla.errors import RequestRejected
from dynaxla.ops.sampling import MAX_LOGPROBS

MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 300
GRAMMAR_KINDS = ("json", "json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling params of a request, each under the name of its HTTP field.

    Attributes:
        max_tokens: most new tokens; at least 1.
        temperature: 0 is greedy: the token of the largest logit, the first of equal ones.
        top_k: only the k largest logits; 0: all.
        top_p: only the fewest tokens whose probability adds up to this; in (0, 1].
        min_p: only tokens of at least this share of the largest probability; in [0, 1].
        repetition_penalty: logits of tokens that were there already (prompt and answer) are divided by this where positive and
            multiplied where negative (as transformers does); 1: nothing.
        presence_penalty, frequency_penalty: taken from the logits of tokens of the answer, once or per occurrence (OpenAI's).
        seed: of this request's draws, which then depend on nothing else in the batch; None: one of the engine's.
        logprobs: number of most probable tokens returned beside the chosen one; None: no logprobs.
        stop: stop strings, which end the answer and are not part of it.
        ignore_eos: go on after the end-of-sequence token.
        grammar: constraint on the answer's text; None: none.
        logit_bias: added to the logits, by token.

    Raises:
        RequestRejected: from the constructor, with the name of the field and the values that are allowed.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        _require_whole("max_tokens", self.max_tokens, 1, math.inf)
        _require_number("temperature", self.temperature, 0, 100)
        _require_whole("top_k", self.top_k, 0, math.inf)
        _require_number("top_p", self.top_p, 0, 1, above=True)
        _require_number("min_p", self.min_p, 0, 1)
        _require_number("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        _require_number("presence_penalty", self.presence_penalty, -100, 100)
        _require_number("frequency_penalty", self.frequency_penalty, -100, 100)
        if self.seed is not None:
            _require_whole("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.logprobs is not None:
            _require_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _require_stops(self.stop)
        if type(self.ignore_eos) is not bool:
            raise RequestRejected(f"ignore_eos={self.ignore_eos!r} is no bool", "write True or False")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestRejected(f"grammar={self.grammar!r} is no Grammar", 'write Grammar("json"), for instance')
        _require_biases(self.logit_bias)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an answer's text.

    Attributes:
        kind: "json" (any JSON object), "json_schema", "regex" or "lark".
        text: the schema, pattern or grammar; empty for "json".
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise RequestRejected(f"grammar: no kind {self.kind!r}", f"one of {', '.join(GRAMMAR_KINDS)}")
        if not isinstance(self.text, str):
            raise RequestRejected("grammar: its text is no str", "give the schema, pattern or grammar as text")


class FinishReason(StrEnum):
    """Why an answer ended: OpenAI's finish reasons, and those of answers that are cut off."""

    STOP = "stop"  # the end-of-sequence token, a stop string, or the grammar's end
    LENGTH = "length"  # max_tokens or max_seq_len
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline
    FAILED = "failed"
    ABANDONED = "abandoned"  # the drain ran out of time


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of an answer.

    Attributes:
        token: its id.
        logprob: the logarithm of its probability before temperature and filters; None if not asked for.
        top_logprobs: the most probable tokens and theirs, most probable first.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of a streamed answer. Its text has whole characters, and never the beginning of a stop string.

    Attributes:
        text: new text; may be empty.
        chosen: the tokens since the last delta.
        finish_reason: only in the last delta.
    """

    text: str
    chosen: Sequence[GeneratedToken]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        text: all of it.
        chosen: its tokens, without the end-of-sequence token.
        finish_reason: why it ended.
        prompt_tokens, cached_tokens: tokens of the prompt, and how many of them were in the cache already.
    """

    text: str
    chosen: Sequence[GeneratedToken]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int


class Generation(Protocol):
    """A request that was accepted. One reader; `cancel` from any thread.

    Attributes:
        prompt_tokens: of its prompt.
        cached_tokens: of these, how many were in the cache already; 0 until the first delta.
    """

    prompt_tokens: int
    cached_tokens: int

    def deltas(self) -> Any:
        """An iterator of `Delta`, which waits for each; the last one has `finish_reason`.

        Raises:
            DeadlineExceeded, NotServing, or what the model raised for this request: instead of a last delta.
        """

    def deltas_async(self) -> Any:
        """The same as an async iterator, for an event loop."""

    def result(self, timeout_s: float | None = None) -> Completion:
        """Waits for the whole answer; raises as `deltas` does, TimeoutError after `timeout_s`."""

    def cancel(self) -> None:
        """Frees the slot at the next step; does nothing if the answer has ended."""


class Engine(Protocol):
    """The interface between an engine and a server in front of it."""

    max_prompt: int  # tokens
    max_length: int  # tokens, of prompt and answer

    def start(self) -> None:
        """Starts the warm-up in a thread; `state` is "starting" until every program is compiled."""

    @property
    def state(self) -> str:
        """One of dynaxla.serving.State's values."""

    @property
    def progress(self) -> tuple[int, int]:
        """The number of programs that are compiled, and that a warm-up compiles."""

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, *, deadline_s: float | None = None) -> Generation:
        """Queues a request.

        Raises:
            RequestRejected: an empty prompt, a token that is none, a grammar that cannot be read.
            RequestTooLarge: a prompt of more than `max_prompt` tokens.
            QueueFull: as many requests wait as may.
            NotServing: not started, warming up, draining or closed.
        """

    def drain(self, timeout_s: float) -> object:
        """Refuses new requests, answers those that were accepted, and ends the worker. Abandons requests that have not ended
        after `timeout_s` seconds. May be called again."""


def _require_whole(name: str, value: object, least: float, most: float) -> None:
    if type(value) is not int or not least <= value <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise RequestRejected(f"{name}={value!r} is not allowed", f"a whole number of at least {least}{limit}")


def _require_number(name: str, value: object, least: float, most: float, *, above: bool = False) -> None:
    is_number = type(value) in (int, float) and least <= value <= most  # type: ignore[operator]
    if not is_number or (above and value == least):
        raise RequestRejected(
            f"{name}={value!r} is not allowed",
            f"a number {'above' if above else 'of at least'} {least} and at most {most}",
        )


def _require_stops(stop: object) -> None:
    if not isinstance(stop, tuple) or len(stop) > MAX_STOP_STRINGS or not all(isinstance(t, str) and t for t in stop):
        raise RequestRejected(
            f"stop={stop!r} is not allowed", f"a tuple of at most {MAX_STOP_STRINGS} texts that are not empty"
        )


def _require_biases(biases: object) -> None:
    if biases is None:
        return
    if not isinstance(biases, Mapping) or len(biases) > MAX_LOGIT_BIASES:
        raise RequestRejected("logit_bias is not allowed", f"a mapping of at most {MAX_LOGIT_BIASES} tokens to numbers")
    for token, bias in biases.items():
        _require_whole("logit_bias: a token", token, 0, math.inf)
        _require_number("logit_bias: a bias", bias, -100, 100)
