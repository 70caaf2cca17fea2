"""The detokenizer: text of tokens that come one by one, in whole characters, and the detection of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

_INCOMPLETE = "\ufffd"  # what a tokenizer gives for a part of a character


class Detokenizer:
    """The text of one answer.

    Args:
        tokenizer: transformers'.
        stops: stop strings.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._begin = self._read = 0  # decoded are tokens from `begin`; those before `read` were text already
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Adds a token. Returns the new text that cannot be part of a stop string; sets `stopped` at one."""
        self._tokens.append(token)
        return self._release(self._new(whole=True))

    def finish(self) -> str:
        """Returns the rest of the text, incomplete characters included."""
        if self.stopped:
            return ""
        text = self._release(self._new(whole=False))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _new(self, *, whole: bool) -> str:
        """The text of the tokens since the last time; none while its end is a part of a character."""
        before = self._decode(self._tokens[self._begin : self._read])
        now = self._decode(self._tokens[self._begin :])
        if len(now) <= len(before) or (whole and now.endswith(_INCOMPLETE)):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def eos_tokens_of(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, by the model's generation config and the tokenizer."""
    told = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [told] if isinstance(told, int) else list(told or ())
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(int(end) for end in [*ends, own] if end is not None)


_NOT_FOLLOWED = MappingProxyType(
    {
        "repetition_penalty": 1.0,
        "encoder_repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": None,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "sequence_bias": None,
        "min_new_tokens": 0,
        "min_length": 0,
    }
)
"""What a model's generation config may say that changes which tokens `generate` chooses greedily, and what says nothing."""


def ignored_generation_config(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of the model's generation config that `generate` applies and the engine does not."""
    config = getattr(model, "generation_config", None)
    said = {name: getattr(config, name, None) for name in _NOT_FOLLOWED}
    return {name: value for name, value in said.items() if value not in (None, [], _NOT_FOLLOWED[name])}
