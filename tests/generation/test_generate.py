"""Text generation by transformers' own loop: the compiled model's tokens are eager's, from few executables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.zoo.architecture import finish

VOCABULARY = 97
PROMPT = 7
NEW_TOKENS = 12

_GPT2: Mapping[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
_LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = ("gpt2", "llama")


def _build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(3)
    if name == "gpt2":
        net: PreTrainedModel = GPT2LMHeadModel(GPT2Config(**_GPT2, bos_token_id=1, eos_token_id=2))
    else:
        net = LlamaForCausalLM(LlamaConfig(**_LLAMA))
    net, _, _ = finish(net, (), {}, dtype)
    return net


def _prompt(batch: int, length: int = PROMPT) -> dict[str, torch.Tensor]:
    """Random tokens; in a batch, the last row has three tokens of padding on its left."""
    ids = torch.randint(5, VOCABULARY, (batch, length))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[-1, :3] = 0
        ids[-1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(net: PreTrainedModel, prompt: Mapping[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    tokens = net.generate(
        **prompt,
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        **settings,
    )
    assert isinstance(tokens, torch.Tensor)
    assert tokens.shape[1] == prompt["input_ids"].shape[1] + NEW_TOKENS
    return tokens


def _compare(
    net: PreTrainedModel, prompts: list[dict[str, torch.Tensor]], recorder: Recorder, most: int, **settings: Any
) -> None:
    """Generates from every prompt with `net.forward` compiled; `most` executables may be made for all of them."""
    expected = [_generate(net, prompt, **settings) for prompt in prompts]
    before = recorder.snapshot()
    net.forward = torch.compile(net.forward, backend="dynaxla")
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert torch.equal(_generate(net, prompt, **settings), tokens)
    made = recorder.snapshot().compiles - before.compiles
    assert 0 < made <= most, f"{made} executables"


@pytest.mark.parametrize(("name", "batch"), quick(itertools.product(MODELS, (1, 2)), ("gpt2", 1)))
def test_dynamic_cache(name: str, batch: int, recorder: Recorder) -> None:
    _compare(_build(name), [_prompt(batch)], recorder, most=NEW_TOKENS)


@pytest.mark.parametrize(("name", "batch"), quick(itertools.product(MODELS, (1, 2)), ("gpt2", 2)))
def test_static_cache(name: str, batch: int, recorder: Recorder) -> None:
    """One executable for the prompt and one for every later token, whatever their number."""
    prompt = _prompt(batch)
    _compare(_build(name), [prompt, prompt], recorder, most=2, cache_implementation="static", disable_compile=True)


@pytest.mark.parametrize("cache", quick(["dynamic", "static"], "static"))
def test_bfloat16(cache: str, recorder: Recorder) -> None:
    settings = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    most = 2 if cache == "static" else NEW_TOKENS
    _compare(_build("llama", torch.bfloat16), [_prompt(2)], recorder, most=most, **settings)


@pytest.mark.long
def test_prompts_of_several_lengths(recorder: Recorder) -> None:
    """Later prompts meet caches and graphs that earlier ones left behind."""
    prompts = [_prompt(2, length) for length in (7, 5, 9)]
    _compare(_build("llama"), prompts, recorder, most=3 * NEW_TOKENS)


@pytest.mark.parametrize("name", quick(MODELS, "llama"))
def test_compiled_by_transformers(name: str, recorder: Recorder) -> None:
    """generate() compiles the decoding step itself when it is asked to."""
    net, prompt = _build(name), _prompt(2)
    config = CompileConfig(backend="dynaxla")
    config._compile_all_devices = True
    expected = _generate(net, prompt, cache_implementation="static", disable_compile=True)
    before = recorder.snapshot().compiles
    tokens = _generate(net, prompt, cache_implementation="static", compile_config=config)
    assert torch.equal(tokens, expected)
    assert 0 < recorder.snapshot().compiles - before <= 2
