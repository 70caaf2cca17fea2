"""Measures SmolLM2-135M, real weights, one request at a time: `generate` in eager, with dynaxla, and with Inductor.

    python -m benchmarks.generate_speed [--tokens 40] [--prompts 12 100] [--ways eager growing static inductor]

For each prompt a case of the first token alone, and one of the whole answer. "growing" uses transformers' default cache;
"static" and "inductor" use a static one. Answers are compared with eager's, token by token. The time of reading every
weight once, measured by summing all weights, is a floor: no way that keeps the weights as they are makes a token in less.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.serve_llm_load import TEXT, load
from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Run

NAMES = ("eager", "growing", "static", "inductor")
Answer = Callable[[torch.Tensor, int], list[int]]


def way(model: PreTrainedModel, name: str) -> Answer:
    """What answers a prompt [1, n] with so many tokens."""
    own = copy.copy(model)  # the weights are shared
    if name in ("growing", "static"):
        own.forward = torch.compile(model.forward, backend="dynaxla")
    elif name == "inductor":
        own.forward = torch.compile(model.forward)
    settings: dict[str, Any] = {} if name in ("eager", "growing") else {"cache_implementation": "static"}
    # transformers would compile a model with a static cache by itself.
    settings |= {"disable_compile": True} if settings else {}

    def answer(ids: torch.Tensor, tokens: int) -> list[int]:
        found = own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=2,
            **settings,
        )
        return found[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    return answer


def floor(model: PreTrainedModel) -> float:
    """Seconds of reading every weight once, at best."""
    weights = {weight.data_ptr(): weight.detach() for weight in model.parameters()}
    took = []
    for _ in range(20):
        began = time.perf_counter()
        for weight in weights.values():
            weight.sum()
        took.append(time.perf_counter() - began)
    return min(took)


def prepare(model: PreTrainedModel, name: str, ids: torch.Tensor, tokens: int) -> Run:
    answer = way(model, name)
    return lambda number: answer(ids, tokens)


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    tokenizer, model = load()
    text = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    about = f"reading all weights once takes {1e3 * floor(model):.1f} ms"
    for length in given.prompts:
        ids = torch.tensor([text[:length]])
        for what, tokens in (("first token", 1), ("whole answer", given.tokens)):
            ways = {name: partial(prepare, model, name, ids, tokens) for name in given.ways}
            yield Case(
                *(f"prompt of {length}, {what}", ways, given.ways[0]),
                check="always", items=tokens, unit="tokens", about=about,
            )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--prompts", type=int, nargs="*", default=(12, 100))
    parser.add_argument("--ways", nargs="*", default=NAMES, choices=NAMES)


if __name__ == "__main__":
    run_cases(__doc__, make_cases, add_arguments, warm=1)
