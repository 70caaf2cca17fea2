"""A tokenizer of bytes, made here: every byte of a text is a token, and a few words are special."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|end|>", "<|begin|>", "<|close|>")
END, BEGIN, CLOSE = range(3)
TEMPLATE = """\
{% for message in messages %}{% if message.content == 'not this' %}{{ raise_exception('this is not taken') }}{% endif %}\
<|begin|>{{ message.role }}:{% if message.name is defined %}({{ message.name }}){% endif %}{{ message.content }}<|close|>\
{% endfor %}{% if add_generation_prompt %}<|begin|>assistant:{% endif %}"""


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[END])
    made.chat_template = template
    return made
