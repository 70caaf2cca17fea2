"""A model whose answers would be wrong in slots is not served: its engine says so before it takes requests."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from dynaxla.errors import NotServing, OptionError
from dynaxla.serving.llm.engine import LanguageEngine
from dynaxla.serving.llm.model_runner import check_against_model
from dynaxla.serving.llm.requests import SamplingParams
from dynaxla.serving.settings import EngineSettings
from tests.serving.llm.small import END, ROOM, VOCABULARY, build, letters

SETTINGS = EngineSettings(
    slots=2, max_seq_len=ROOM - 4, rows=(2,), kv_lengths=(ROOM - 4,), prefill_chunks=((1, 8),), steps=3
)
_LAYERS = {"attention_types": [[["global", "local"], 1]], "window_size": 6, "num_layers": 2, "num_heads": 4}


def _engine(net: PreTrainedModel) -> LanguageEngine:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return LanguageEngine(copy.deepcopy(net.eval()).to("dynaxla"), letters(), SETTINGS)


def test_a_model_with_masks_of_its_own_is_not_served() -> None:
    """GPT-Neo's local layers take their windows from the end of what is read."""
    config = GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, max_position_embeddings=ROOM, eos_token_id=END, **_LAYERS
    )
    engine = _engine(GPTNeoForCausalLM(config))
    engine.start()
    with pytest.raises(NotServing, match="by itself"):
        engine.wait_until_ready()
    with pytest.raises(NotServing, match="by itself"):
        engine.submit([1, 2], SamplingParams())


@pytest.mark.parametrize("kind", ["bart", "dynamic"])
def test_a_model_that_looks_at_values_is_refused(kind: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": ROOM, "eos_token_id": END, "pad_token_id": END}
    if kind == "bart":
        more = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
        net: PreTrainedModel = BartForCausalLM(BartConfig(**sizes, **more, is_decoder=True, is_encoder_decoder=False))
    else:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        more = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        net = LlamaForCausalLM(LlamaConfig(**sizes, **more, rope_parameters=rope))
    with pytest.raises(OptionError, match="looks at values"):
        _engine(net)


def test_a_wrong_token_and_a_wrong_probability_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LanguageEngine(build("llama").to("dynaxla"), letters(), SETTINGS)
    with torch.no_grad():
        runner = engine._runner
        check_against_model(runner, SETTINGS, torch.float32)
        right = runner.logits
        monkeypatch.setattr(runner, "logits", lambda tokens: right(tokens).roll(1, -1))
        with pytest.raises(OptionError, match="most probable"):
            check_against_model(runner, SETTINGS, torch.float32)
        monkeypatch.setattr(runner, "logits", lambda tokens: right(tokens) * 1.1)
        with pytest.raises(OptionError, match="most probable"):
            check_against_model(runner, SETTINGS, torch.float32)
        monkeypatch.setattr(runner, "logits", lambda tokens: right(tokens) * float("nan"))
        check_against_model(runner, SETTINGS, torch.float32)
