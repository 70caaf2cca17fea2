"""Small models with random weights, a tokenizer of letters, and engines that serve them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dynaxla.serving.llm.engine import LanguageEngine
from dynaxla.serving.settings import EngineSettings

VOCABULARY = 128
ROOM = 64
END = 0
SETTINGS = EngineSettings(
    slots=4, max_seq_len=ROOM, rows=(4,), kv_lengths=(ROOM,), prefill_chunks=((1, 8),), steps=3, max_queue=8
)

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": ROOM,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}
_HEADS = {"head_dim": 16}
_WINDOW = {"sliding_window": 8}
_KINDS: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, _HEADS),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**_HEADS, **_WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {**_HEADS, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**_WINDOW, "num_local_experts": 4}),
}
KINDS = (*_KINDS, "gpt2")


def build(kind: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """A model on the host, in evaluation; large weights, so that its tokens vary.

    Args:
        sizes: of its config, where they are others; not of "gpt2".
    """
    torch.manual_seed(7)
    if kind == "gpt2":
        of_gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": ROOM, "vocab_size": VOCABULARY}
        net: PreTrainedModel = GPT2LMHeadModel(GPT2Config(**of_gpt2, bos_token_id=None, eos_token_id=END))
    else:
        model, config, more = _KINDS[kind]
        net = model(config(**{**_SIZES, **more, **sizes}))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return net.eval().to(dtype)


def letters() -> PreTrainedTokenizerFast:
    """A token per byte-like character, and some of several; 0 ends a text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    ascii_first = sorted(alphabet, key=lambda letter: (ord(letter) >= 128, letter))
    vocabulary = {"<end>": END, **{letter: i + 1 for i, letter in enumerate(ascii_first[: VOCABULARY - 1])}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and the same model on the host."""

    engine: LanguageEngine
    eager: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    def greedy(self, prompt: Sequence[int], tokens: int, **settings: Any) -> list[int]:
        """What eager's `generate` answers alone, without the end."""
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            found = self.eager.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                **{"do_sample": False, "pad_token_id": END, **settings},
            )
        answer = found[0, len(prompt) :].tolist()
        return answer[: answer.index(END)] if END in answer else answer

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Eager's, float32 [length, vocabulary]."""
        with torch.no_grad():
            return self.eager(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


@contextmanager
def served(
    kind: str, settings: EngineSettings = SETTINGS, sizes: Mapping[str, Any] | None = None, **more: Any
) -> Iterator[Served]:
    """A model of these sizes, served."""
    eager, tokenizer = build(kind, **(sizes or {})), letters()
    engine = LanguageEngine(copy.deepcopy(eager).to("dynaxla"), tokenizer, settings, **more)
    engine.start()
    engine.wait_until_ready()
    try:
        yield Served(engine, eager, tokenizer)
    finally:
        engine.drain(30)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random tokens, none of which ends a text."""
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]
