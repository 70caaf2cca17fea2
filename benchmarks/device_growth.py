"""Counts programs and seconds of a small Llama's `generate` on the device, op by op, with a cache that grows.

    python -m benchmarks.device_growth [--tokens N] [--exact]

Each line is one prompt of another length: programs compiled, programs loaded from the disk cache, seconds. The last
length runs once more. `--exact` compiles a program for each set of sizes, without buckets. With an empty
DYNAXLA_CACHE_DIR the run is a first run.
"""

from __future__ import annotations

import argparse
import logging
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxla
from dynaxla.device import dynamic_op_graphs

PROMPTS = (9, 23, 37, 37)


def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--exact", action="store_true")
    given = parser.parse_args()
    logging.disable()
    if given.exact:
        dynamic_op_graphs.MANY = 1 << 30
    asked = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": given.tokens}
    network_here = network()
    prompts = [torch.randint(1, 1000, (1, length)) for length in PROMPTS]
    expected = [network_here.generate(prompt, **asked) for prompt in prompts]
    device = dynaxla.use()
    away = network_here.to(device)
    for prompt, tokens in zip(prompts, expected, strict=True):
        before, started = dynaxla.read_metrics(), time.perf_counter()
        made = away.generate(prompt.to(device), **asked).cpu()
        seconds, after = time.perf_counter() - started, dynaxla.read_metrics()
        programs = f"{after.compiles - before.compiles:4} compiled {after.loads - before.loads:4} loaded"
        same = "eager's tokens" if torch.equal(made, tokens) else "OTHER TOKENS"
        print(f"prompt of {prompt.shape[1]:3}: {programs} {seconds:6.2f} s, {same}", flush=True)


if __name__ == "__main__":
    main()
