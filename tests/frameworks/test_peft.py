"""PEFT: low-rank adapters that are trained, switched, merged and taken out again behind a compiled model."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    max_position_embeddings=32,
    pad_token_id=0,
    use_cache=False,
)


def adapter(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def net() -> PeftModel:
    torch.manual_seed(1)
    net = get_peft_model(LlamaForCausalLM(CONFIG), adapter(2), adapter_name="one")
    net.add_adapter("two", adapter(4))
    return net.eval()


def _assert_same(compiled: nn.Module, net: nn.Module, ids: Tensor) -> None:
    with torch.no_grad():
        assert_close(compiled(ids).logits, net(ids).logits)


@pytest.mark.long
def test_adapters_are_switched_and_merged(net: PeftModel, recorder: Recorder) -> None:
    """A program for each adapter, for none, and for what merging leaves; going back to one is free."""
    compiled, ids = torch.compile(net, backend="dynaxla"), torch.randint(5, 40, (2, 9))
    _assert_same(compiled, net, ids)
    for name in ("two", "one", "two"):  # another adapter's parameters stop to need gradients at the first turn
        net.set_adapter(name)
        _assert_same(compiled, net, ids)
    with recorder.expect(compiles=0):
        for name in ("one", "two"):
            net.set_adapter(name)
            _assert_same(compiled, net, ids)
    with recorder.expect(compiles=1), net.disable_adapter():
        _assert_same(compiled, net, ids)
    for merged in (["one"], ["one", "two"]):
        net.merge_adapter(merged)
        with recorder.expect(eager_ops=0):
            _assert_same(compiled, net, ids)
        net.unmerge_adapter()
        with recorder.expect(compiles=0):
            _assert_same(compiled, net, ids)
    whole = net.merge_and_unload()
    _assert_same(torch.compile(whole, backend="dynaxla"), whole, ids)


def test_an_adapter_is_trained(net: PeftModel, recorder: Recorder) -> None:
    compiled, ids = torch.compile(net.train(), backend="dynaxla"), torch.randint(5, 40, (2, 9))
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)
    for turn in range(3):
        with recorder.expect(compiles=2 if turn == 0 else 0, eager_ops=0):
            ours = torch.autograd.grad(compiled(ids, labels=ids).loss, trained)
        wanted = torch.autograd.grad(net(ids, labels=ids).loss, trained)
        for parameter, one, other in zip(trained, ours, wanted, strict=True):
            assert_close(one, other)
            parameter.grad = one
        optimizer.step()
