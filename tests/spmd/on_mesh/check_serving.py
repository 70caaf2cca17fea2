"""A language model's programs on a mesh, below the engine: tokens, what each device holds, and what cannot be split."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import dynaxla
from dynaxla.errors import OptionError, ShardingError
from dynaxla.observe.collectives import list_collectives
from dynaxla.observe.recorder import Recorder
from dynaxla.serving.llm.model_runner import IDLE_ROW, ModelRunner, RowInput
from dynaxla.serving.llm.model_steps import DeviceState
from dynaxla.serving.llm.tensor_parallel import split_model
from dynaxla.targets.registry import mesh_devices
from tests.serving.llm.small import SETTINGS, build, prompts
from tests.spmd.on_mesh.check_tensors import spec_of

FEW = dataclasses.replace(SETTINGS, slots=2, rows=(2,), tensor_parallel=2)
PLAIN = {"top_p": 1.0, "repetition_penalty": 1.0}


@pytest.fixture
def recorder() -> Recorder:
    return dynaxla.recorder()


@torch.no_grad()
def test_tokens_are_those_of_one_device(recorder: Recorder) -> None:
    """Greedy, in float32. A layer sums over devices twice, the embedding once."""
    host = build("llama", num_hidden_layers=1)
    (prompt,) = prompts(8)
    expected = host.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=0)[0, 8:].tolist()
    runner = ModelRunner(copy.deepcopy(host), FEW, [])
    devices = mesh_devices()
    assert devices is not None
    before = set(devices.programs)
    first = {"length": 0, "count": 8, "left": 1, "ignore_eos": 1}
    with recorder.expect(compiles=2):
        tokens = list(runner.prefill([RowInput(first, PLAIN)], [prompt], (1, 8), 64).tokens[0])
        while len(tokens) < 10:
            ints = {"token": tokens[-1], "length": 7 + len(tokens), "left": 9, "drawn": len(tokens), "ignore_eos": 1}
            tokens += runner.decode([RowInput(ints, PLAIN), IDLE_ROW], 3, 64).tokens[0]
    assert tokens == expected
    made = [program for program in devices.programs if program not in before]
    assert len(made) == 2
    for program in made:
        assert [each.kind for each in list_collectives(program.hlo_text())].count("all-reduce") == 3


def test_each_device_has_its_heads() -> None:
    model = build("llama")
    devices = split_model(model, 2)
    layer = model.model.layers[0]
    assert spec_of(layer.self_attn.q_proj.weight) == ("model", None)
    assert spec_of(layer.mlp.down_proj.weight) == (None, "model")
    state = DeviceState(model, 4, 16, [0], devices)
    assert {spec_of(each) for each in state.kv} == {(None, "model", None, None)}
    assert {spec_of(each) for each in (state.ends, state.penalties.bias)} == {(None,), (None, None)}
    assert devices.count_bytes(state.kv) == sum(each.nbytes for each in state.kv) // 2


def test_heads_of_keys_that_are_not_divided_are_on_every_device() -> None:
    model = build("llama")
    devices = split_model(model, 4)
    state = DeviceState(model, 4, 16, [0], devices)
    assert spec_of(state.kv[0]) == (None, None, None, None), "two heads, four devices"
    assert devices.count_bytes(state.kv) == sum(each.nbytes for each in state.kv)


def test_a_vocabulary_that_is_not_divided_is_on_every_device() -> None:
    model = build("llama")
    model.resize_token_embeddings(126)
    split_model(model, 4)
    assert spec_of(model.get_input_embeddings().weight) == (None, None)
    assert spec_of(model.get_output_embeddings().weight) == (None, None)
    assert spec_of(model.model.layers[1].mlp.up_proj.weight) == ("model", None)


@pytest.mark.parametrize(
    ("kind", "count", "error", "told"),
    [
        ("gpt2", 2, OptionError, "GPT2LMHeadModel has no plan for tensor parallelism"),
        ("llama", 3, OptionError, "do not divide the 4 attention heads of LlamaForCausalLM"),
        ("gemma2", 8, OptionError, "write one of 1, 2, 4"),
    ],
)
def test_what_cannot_be_split_is_told(kind: str, count: int, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        ModelRunner(build(kind), dataclasses.replace(SETTINGS, tensor_parallel=count), [])


def test_too_many_devices_are_told() -> None:
    model = build("llama")
    model.config.num_attention_heads = 16
    with pytest.raises(ShardingError, match="has 16 devices, and there are 8"):
        split_model(model, 16)
