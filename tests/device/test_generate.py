"""transformers' generate on the device, unmodified: the host's tokens, op by op and compiled, nothing of it on the host."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from dynaxla.device.storage import storage_of
from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.zoo.architecture import finish

VOCABULARY = 97
TOKENS = 5
STATIC: Mapping[str, Any] = {"cache_implementation": "static", "disable_compile": True}
SETTINGS: Mapping[str, Mapping[str, Any]] = {"dynamic": {}, "static": STATIC}
MODELS = ("gpt2", "llama", "t5")
CASES = list(itertools.product(MODELS, SETTINGS))


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if name == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
        net: PreTrainedModel = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2))
    elif name == "llama":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        more = {"intermediate_size": 48, "max_position_embeddings": 64, "vocab_size": VOCABULARY}
        net = LlamaForCausalLM(LlamaConfig(**shape, **more, pad_token_id=0))
    else:
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
        net = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
    return finish(net, (), {}, torch.float32)[0]  # type: ignore[return-value]


def prompt() -> dict[str, torch.Tensor]:
    """Random tokens; the second row has three of padding on its left."""
    ids = torch.randint(5, VOCABULARY, (2, 7))
    mask = torch.ones_like(ids)
    mask[-1, :3] = 0
    ids[-1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(net: PreTrainedModel, given: Mapping[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """Tokens, int64, on the host, of the prompt's copies where the model is."""
    there = {name: x.to(net.device) for name, x in given.items()}
    counts = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
    tokens = net.generate(**there, **counts, **{"do_sample": False, **settings})
    assert isinstance(tokens, torch.Tensor)
    assert tokens.device.type == net.device.type
    return tokens.cpu()


def agree(name: str, cache: str, recorder: Recorder, way: str) -> None:
    net, given, settings = build(name), prompt(), SETTINGS[cache]
    wanted = generate(net, given, **settings)
    net.to("dynaxla")
    if way == "forward":
        net.forward = torch.compile(net.forward, backend="dynaxla")
    elif way == "module":
        net.compile(backend="dynaxla")
    before = recorder.snapshot()
    assert torch.equal(generate(net, given, **settings), wanted)
    after = recorder.snapshot()
    assert (after.graphs > before.graphs) == (way != "")
    if cache == "static":
        with recorder.expect(compiles=0, graphs=0):
            assert torch.equal(generate(net, given, **settings), wanted)
    assert_sampled_again(net, given, settings)
    assert recorder.snapshot().host_ops == before.host_ops


def assert_sampled_again(net: PreTrainedModel, given: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(generate(net, given, do_sample=True, **settings))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert all(((tokens >= 0) & (tokens < VOCABULARY)).all() for tokens in found)


@pytest.mark.parametrize(("name", "cache"), quick(CASES, ("llama", "static")))
def test_op_by_op(name: str, cache: str, recorder: Recorder) -> None:
    agree(name, cache, recorder, way="")


@pytest.mark.parametrize(("name", "cache"), quick(CASES, ("gpt2", "static")))
def test_compiled(name: str, cache: str, recorder: Recorder) -> None:
    agree(name, cache, recorder, way="forward")


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_compiled_as_a_module(name: str, recorder: Recorder) -> None:
    agree(name, "dynamic", recorder, way="module")


def test_a_static_cache_is_written_where_it_lies(recorder: Recorder) -> None:
    """After the first, each step is the same executable, which takes the cache's memory."""
    net, given = build("llama"), prompt()
    wanted = generate(net, given, **STATIC)
    net.to("dynaxla").forward = torch.compile(net.forward, backend="dynaxla")
    cache = StaticCache(config=net.config, max_cache_len=7 + TOKENS)
    held: list[Any] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        held.append([storage_of(x).buffer for layer in cache.layers for x in (layer.keys, layer.values)])
        return scores

    def run() -> torch.Tensor:
        return generate(net, given, past_key_values=cache, logits_processor=LogitsProcessorList([note]))

    for _ in range(2):  # the first prompt also makes the cache's tensors
        assert torch.equal(run(), wanted)
        cache.reset()
    held.clear()
    with recorder.expect(compiles=0, graphs=0):
        assert torch.equal(run(), wanted)
    assert len(held) == TOKENS
    for before in held[:-1]:
        assert [buffer.is_deleted() for buffer in before] == [True] * 4
    assert not any(buffer.is_deleted() for buffer in held[-1])
