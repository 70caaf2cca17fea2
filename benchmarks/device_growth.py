"""Counts programs and seconds of a small Llama's `generate` on the device, op by op, with a cache that grows.

    python -m benchmarks.device_growth [--tokens N] [--exact]

The calls are prompts of other lengths; the last length runs twice. The record has, for each call of the first pass, seconds
and programs. `--exact` compiles a program for each set of sizes, without buckets.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynaxla
from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run
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


def prepare(where: str, tokens: int) -> Run:
    net = network().to(where)
    torch.manual_seed(0)
    prompts = [torch.randint(1, 1000, (1, length)).to(where) for length in PROMPTS]
    asked = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": tokens}
    return lambda number: net.generate(prompts[number], **asked).cpu()


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    logging.disable()
    if given.exact:
        dynamic_op_graphs.MANY = 1 << 30
    dynaxla.use()
    ways = {"eager": partial(prepare, "cpu", given.tokens), "device": partial(prepare, "dynaxla", given.tokens)}
    inputs = [{"prompt": length} for length in PROMPTS]
    yield Case("generate", ways, inputs=inputs, check="always", items=given.tokens, unit="tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--exact", action="store_true")


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments, rounds=1, seconds=0.0)
