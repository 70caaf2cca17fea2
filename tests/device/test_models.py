"""Architectures of the zoo, moved by `.to`, give eager's numbers: op by op, compiled, and trained."""

from __future__ import annotations

import pytest
import torch

from conformance.device_zoo import forward, on_device, on_host, trained
from tests.lists import quick
from tests.zoo.registry import find

COMPILED = ("mlp", "recommender", "lstm", "bert", "llama-decode-step", "resnet")
EAGER = ("mlp", "recommender", "variational-autoencoder", "lstm-cell")


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", quick(COMPILED, "recommender", "lstm", "llama-decode-step"))
def test_compiled(name: str) -> None:
    found = forward(find(name), is_compiled=True)
    assert found.status == "right", found


@pytest.mark.parametrize("name", quick(EAGER, "mlp"))
def test_op_by_op(name: str) -> None:
    found = forward(find(name), is_compiled=False)
    assert found.status == "right", found


@pytest.mark.parametrize(("name", "is_compiled"), quick([("mlp", True), ("mlp", False), ("lstm", True)], ("mlp", True)))
def test_trained(name: str, is_compiled: bool) -> None:
    found = trained(find(name), is_compiled)
    assert found.status == "right", found


def test_a_cache_is_moved() -> None:
    """The sweep compares what was moved: also tensors that a cache holds."""
    cache = find("llama-decode-step").build(torch.float32)[2]["past_key_values"]
    there = on_device(cache)
    assert cache.layers[0].keys.device.type == "cpu"
    assert there.layers[0].keys.device.type == "dynaxla"
    assert torch.equal(on_host(there).layers[0].keys, cache.layers[0].keys)
