"""OpenAI's response schema: text and chat completions, whole and as chunks, with logprobs and usage."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from dynaxla.serving.http.chat_template import Text
from dynaxla.serving.llm.requests import FinishReason, GeneratedToken

_LEAST_LOGPROB = -9999.0  # what OpenAI says for minus infinity, for which JSON has no number


class ChoiceSchema(Protocol):
    """The schema of one choice."""

    kind: str
    chunk_object: str

    def first_delta(self) -> dict[str, Any] | None:
        """What a stream says before any text; None: nothing."""

    def part(self, text: str, chosen: Sequence[GeneratedToken], finish_reason: FinishReason | None) -> dict[str, Any]:
        """What is new in a stream."""

    def whole(self, text: str, chosen: Sequence[GeneratedToken], finish_reason: FinishReason | None) -> dict[str, Any]:
        """A whole choice."""


_TORN = "\N{REPLACEMENT CHARACTER}"


class CompletionChoice:
    """A choice of /v1/completions.

    Args:
        index: of the choice.
        text: tells tokens' texts.
        echo: what stands before the answer; None: nothing.
        with_logprobs: whether logprobs are told.
    """

    kind = chunk_object = "text_completion"

    def __init__(self, index: int, text: Text, *, echo: str | None, with_logprobs: bool) -> None:
        self._index = index
        self._text = text
        self._echo = echo
        self._with_logprobs = with_logprobs
        self._offset = 0  # characters of the answer up to the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def first_delta(self) -> dict[str, Any] | None:
        return None if self._echo is None else self.part(self._echo, (), None)

    def part(self, text: str, chosen: Sequence[GeneratedToken], finish_reason: FinishReason | None) -> dict[str, Any]:
        logprobs = self._logprobs(chosen) if self._with_logprobs else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, text: str, chosen: Sequence[GeneratedToken], finish_reason: FinishReason | None) -> dict[str, Any]:
        return self.part((self._echo or "") + text, chosen, finish_reason)

    def _logprobs(self, chosen: Sequence[GeneratedToken]) -> dict[str, Any]:
        offsets = []
        for each in chosen:
            begun, _ = self._decoder.getstate()
            text = self._decoder.decode(self._text.bytes_of(each.token))
            # A character that was begun and never ended shows only now, in front of this token's.
            offsets.append(self._offset + bool(begun and text.startswith(_TORN)))
            self._offset += len(text)
        return {
            "tokens": [self._text.name_of(each.token) for each in chosen],
            "token_logprobs": [_number(each.logprob) for each in chosen],
            "top_logprobs": [self._top(each) for each in chosen],
            "text_offset": offsets,
        }

    def _top(self, chosen: GeneratedToken) -> dict[str, float | None]:
        """The most probable tokens, and the chosen one: the first of several with the same text counts."""
        top: dict[str, float | None] = {}
        for token, logprob in (*chosen.top_logprobs, (chosen.token, chosen.logprob)):
            top.setdefault(self._text.name_of(token), _number(logprob))
        return top


class ChatChoice:
    """A choice of /v1/chat/completions; see `CompletionChoice`."""

    kind, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, index: int, text: Text, *, with_logprobs: bool) -> None:
        self._index = index
        self._text = text
        self._with_logprobs = with_logprobs

    def first_delta(self) -> dict[str, Any] | None:
        return self._part({"role": "assistant", "content": ""}, None, None)

    def part(self, text: str, chosen: Sequence[GeneratedToken], finish_reason: FinishReason | None) -> dict[str, Any]:
        return self._part({"content": text} if text or not finish_reason else {}, self._logprobs(chosen), finish_reason)

    def whole(self, text: str, chosen: Sequence[GeneratedToken], finish_reason: FinishReason | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs(chosen),
            "finish_reason": finish_reason,
        }

    def _part(self, delta: dict[str, Any], logprobs: Any, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, chosen: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            self._token(each.token, each.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in each.top_logprobs]}
            for each in chosen
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        name, data = self._text.name_of(token), self._text.bytes_of(token)
        return {"token": name, "logprob": _number(logprob), "bytes": list(data)}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(float(logprob), _LEAST_LOGPROB)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The tokens that a request took."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
