"""transformers, accelerate and Lightning in several processes of the device: numbers are those of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.children import run_ranks
from tests.distributed.frameworks import load_in_parts, train_by_accelerate, train_by_lightning
from tests.tolerances import assert_close

WAYS = {"transformers": load_in_parts, "accelerate": train_by_accelerate, "lightning": train_by_lightning}


def compare(rank: int, way: str, folder: str) -> None:
    theirs, mine = WAYS[way]("cpu", folder), WAYS[way]("dynaxla", folder)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert_close(value, theirs[name])


@pytest.mark.long
@pytest.mark.parametrize("way", ["accelerate", "lightning"])
def test_trainers_are_the_hosts(way: str, tmp_path: Path) -> None:
    run_ranks(compare, way, str(tmp_path))


@pytest.mark.long
def test_a_model_is_loaded_in_parts(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(vocab_size=32, num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    run_ranks(compare, "transformers", str(tmp_path))
