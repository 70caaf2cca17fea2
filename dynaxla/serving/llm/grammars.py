"""Grammars of answers, by llguidance: a bit mask of the tokens that may come next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxla.errors import RequestRejected
from dynaxla.serving.llm.requests import Grammar


class GrammarCompiler:
    """Compiles grammars for one tokenizer; the table of its tokens is built for the first grammar.

    Args:
        tokenizer: a fast one of transformers.
        vocabulary: how many logits the model gives.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._table: Any = None

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Compiles a grammar. Returns its state at the beginning of an answer.

        Raises:
            RequestRejected: it cannot be read.
        """
        from llguidance import LLMatcher  # what nobody asks for is not loaded

        text = _read(LLMatcher, grammar)
        matcher = LLMatcher(self._tokens(), text, log_level=0)
        if matcher.is_error():
            raise RequestRejected(f"grammar: {matcher.get_error()}", "see llguidance's documentation for what it takes")
        return GrammarMatcher(matcher, self._vocabulary)

    def _tokens(self) -> Any:
        if self._table is None:
            from llguidance.hf import from_tokenizer

            # Of a larger vocabulary the model's further logits stand for no text.
            self._table = from_tokenizer(self._tokenizer, n_vocab=max(self._vocabulary, len(self._tokenizer)))
        return self._table


class GrammarMatcher:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._words = matcher, (vocabulary + 31) // 32

    def make_mask(self) -> Tensor:
        """int32 [words]: a bit for each token that may come next."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        return bits[: self._words]

    def is_over_after(self, token: int) -> bool:
        """Advances by a token. Returns whether only the end may follow, or nothing."""
        return not self._matcher.consume_token(token) or bool(self._matcher.is_stopped())


def _read(matcher: Any, grammar: Grammar) -> str:
    try:
        if grammar.kind == "json":
            return str(matcher.grammar_from_json_schema('{"type": "object"}'))
        if grammar.kind == "json_schema":
            return str(matcher.grammar_from_json_schema(grammar.text))
        if grammar.kind == "regex":
            return str(matcher.grammar_from_regex(grammar.text))
        return str(matcher.grammar_from_lark(grammar.text))
    except ValueError as error:
        raise RequestRejected(f"grammar: {error}", f"a {grammar.kind} that can be read") from None
