"""Measures steady-state calls against eager and Inductor, in turn in one process, and prints ratios.

    python -m benchmarks.steady_state                    # everything
    python -m benchmarks.steady_state tiny-mlp bert-base # some
    python -m benchmarks.steady_state --no-inductor      # Inductor takes half a minute of compiling per model

Each round times every backend once in turn, so that noise of the machine affects all alike. A ratio is the median over
rounds of eager's time divided by the backend's in the same round. Above 1 the backend is faster than eager.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Call = Callable[[], Any]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def tiny_mlp() -> Built:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (torch.randn(8, 16),), {}


def deep_mlp() -> Built:
    """150 parameters and no work: what a call costs per weight."""
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(75)]), (torch.randn(2, 8),), {}


def bert_base() -> Built:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), (torch.randint(0, 30000, (1, 128)),), {}


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), (torch.randint(0, 50000, (1, 128)),), {"use_cache": False}


def resnet50() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), (torch.randn(1, 3, 224, 224),), {}


def vit_base() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000)), (torch.randn(1, 3, 224, 224),), {}


def llama_decode() -> Built:
    """One token of a 100M-parameter Llama with a static cache of 256 positions, 64 of them filled."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    cache = StaticCache(config=config, max_cache_len=256)
    with torch.no_grad():
        model(torch.randint(0, 32000, (1, 64)), past_key_values=cache, use_cache=True)
    filled = [layer.cumulative_length for layer in cache.layers]

    class Step(nn.Module):
        """The same step again and again: what it added to the cache is forgotten before the next."""

        def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            for length in filled:
                length.fill_(64)
            return model(token, past_key_values=cache, use_cache=True, position_ids=position).logits

    return Step(), (torch.tensor([[5]]), torch.tensor([[64]])), {}


MODELS: dict[str, Callable[[], Built]] = {
    "tiny-mlp": tiny_mlp,
    "deep-mlp": deep_mlp,
    "bert-base": bert_base,
    "gpt2": gpt2,
    "resnet50": resnet50,
    "vit-base": vit_base,
    "llama-100m-decode": llama_decode,
}


def measure(name: str, backends: list[str], seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, args, kwargs = MODELS[name]()
    model.eval()
    calls: dict[str, Call] = {"eager": lambda: model(*args, **kwargs)}
    first_call_s = {}
    for backend in backends:
        compiled = torch.compile(model, backend=backend)
        calls[backend] = lambda compiled=compiled: compiled(*args, **kwargs)
        started = time.perf_counter()
        calls[backend]()
        first_call_s[backend] = time.perf_counter() - started
    rounds = _rounds(calls, seconds)
    medians = {key: statistics.median(times) for key, times in rounds.items()}
    ratios = {
        key: statistics.median(e / t for e, t in zip(rounds["eager"], rounds[key], strict=True)) for key in backends
    }
    return {
        "model": name,
        "median_ms": {k: v * 1e3 for k, v in medians.items()},
        "ratio": ratios,
        "first_s": first_call_s,
    }


def _rounds(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Times of one call per backend and round; short calls are batched so that a clock tick does not matter."""
    for call in calls.values():
        for _ in range(3):
            call()
    repeats = max(1, round(0.002 / _time(calls["eager"], 1)))
    rounds: dict[str, list[float]] = {key: [] for key in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds["eager"]) < 5:
        for key, call in calls.items():
            rounds[key].append(_time(call, repeats))
    return rounds


def _time(call: Call, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--seconds", type=float, default=12.0, help="measuring time per model")
    parser.add_argument("--json", type=Path, help="write the results there too")
    given = parser.parse_args()
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"unknown model {sorted(unknown)}; choose from {', '.join(MODELS)}")
    backends = ["dynaxla"] if given.no_inductor else ["dynaxla", "inductor"]
    results = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    with torch.no_grad():
        for name in given.models or MODELS:
            result = measure(name, backends, given.seconds)
            results.append(result)
            cells = [f"eager {result['median_ms']['eager']:9.3f} ms"]
            for b in backends:
                cells.append(
                    f"{b} {result['median_ms'][b]:9.3f} ms = {result['ratio'][b]:.2f}x (first {result['first_s'][b]:.1f} s)"
                )
            print(f"{name:18s} " + "   ".join(cells), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
