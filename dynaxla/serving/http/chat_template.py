"""Between text and tokens: prompts, chats by the model's template, and the text and bytes of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from dynaxla.serving.http.http_errors import invalid

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_MARK = "\ue000"  # of the private use area; put into what only looks like a special token, while a template is filled


class Text:
    """A tokenizer of transformers, for several threads at once.

    Args:
        tokenizer: a fast one (`PreTrainedTokenizerFast`), with a chat template if chats are to be answered.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        copy = type(tokenizer.backend_tokenizer).from_str
        self._reads_specials, self._reads_plain = (copy(tokenizer.backend_tokenizer.to_str()) for _ in range(2))
        for each in (self._reads_specials, self._reads_plain):
            each.no_truncation()  # an over-long text is refused, not cut
            each.no_padding()
        self._reads_plain.encode_special_tokens = True
        added = self._reads_specials.get_added_tokens_decoder()
        self._specials: Mapping[str, int] = {token.content: at for at, token in added.items() if token.special}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._pieces_are_bytes = "ByteLevel" in json.dumps(json.loads(self._reads_specials.to_str())["decoder"])
        self._size = max(self._reads_specials.get_vocab().values()) + 1  # there may be holes

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with those that the tokenizer puts around one; special tokens may be spelled out."""
        return list(self._reads_specials.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a prompt that came as tokens.

        Raises:
            ApiError: one of them is no token.
        """
        self.check_tokens(tokens, "prompt")
        return str(self._reads_specials.decode(tokens, skip_special_tokens=False))

    def check_tokens(self, tokens: Iterable[int], field: str) -> None:
        """Raises ApiError, which names the field, if one of them is no token."""
        if any(not 0 <= token < self._size for token in tokens):
            raise invalid(f"{field}: a token is a number from 0 to {self._size - 1}", field, "invalid_value")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a chat up to where the assistant's answer begins.

        Special tokens that are spelled out in a message are its text, not marks of the chat: nobody can end his own message
        and begin another's.

        Raises:
            ApiError: the model has no chat template, or its template refuses these messages.
        """
        if self._tokenizer.chat_template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        spelled = any(self._special.search(text) for message in messages for text in message.values())
        if not spelled:
            return list(self._reads_specials.encode(self._fill(messages), add_special_tokens=False).ids)
        if any(_MARK in text for message in messages for text in message.values()):
            raise invalid("special tokens and U+E000 do not go together in a chat", "messages", "invalid_value")
        without = [{name: self._special.sub("x", text) for name, text in message.items()} for message in messages]
        if not self._can_cut(self._fill(without)):
            what = "a message that spells out a special token cannot be told from a mark of the chat by this model's tokenizer"
            raise invalid(what, "messages", "special_token")
        marked = [{name: self._mark(text) for name, text in message.items()} for message in messages]
        return self._encode_marked(self._fill(marked))

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; it may be a part of a character."""
        piece = self._reads_specials.id_to_token(token)
        if piece is None:
            return b""
        if piece in self._specials:
            return str(piece).encode()
        if self._pieces_are_bytes and all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def name_of(self, token: int) -> str:
        """A token's text; "bytes:\\xe2\\x96" for a part of a character, as OpenAI writes it."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _fill(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            filled = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # what a template says that wants roles to take turns, for instance
            raise invalid(f"the chat template refuses these messages: {error}", "messages", "invalid_value") from None
        return str(filled)

    def _can_cut(self, filled: str) -> bool:
        """Whether a chat cut at its special tokens has the tokens of the whole: some tokenizers begin a text otherwise, or take
        the space around a special token for a part of it."""
        whole = self._reads_specials.encode(filled, add_special_tokens=False).ids
        return list(whole) == self._encode_marked(filled)

    def _mark(self, text: str) -> str:
        return self._special.sub(lambda match: f"{match[0][:1]}{_MARK}{match[0][1:]}", text)

    def _encode_marked(self, filled: str) -> list[int]:
        """Tokenizers cut a text at its special tokens first, so what is between them can be encoded alone."""
        tokens: list[int] = []
        begin = 0
        for match in [*self._special.finditer(filled), None]:
            between = filled[begin : match.start() if match else None].replace(_MARK, "")
            tokens += self._reads_plain.encode(between, add_special_tokens=False).ids if between else []
            if match:
                tokens.append(self._specials[match[0]])
                begin = match.end()
        return tokens


def _byte_of() -> dict[str, int]:
    """The bytes behind the characters of a byte-level tokenizer: GPT-2's table."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF: Mapping[str, int] = _byte_of()
