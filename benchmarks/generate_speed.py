"""Measures SmolLM2-135M, real weights, one request at a time: `generate` in eager, with dynaxla, and with Inductor.

    python -m benchmarks.generate_speed [--tokens 40] [--rounds 5] [--prompts 12 100] [--ways eager growing static inductor]

The ways take turns in one process, so that other load on the machine affects all of them. Prints tokens per second of a
whole answer, the milliseconds of its first token, and both as ratios to eager; medians over the rounds. "growing" uses
transformers' default cache; "static" and "inductor" use a static one. Answers that differ from eager's are counted.
"floor" is the time of reading every weight once, measured by summing all weights: no way that keeps the weights as they
are makes a token in less.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.serve_llm_load import TEXT, load

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


def seconds(answer: Answer, ids: torch.Tensor, tokens: int) -> tuple[float, list[int]]:
    """How long an answer takes, and the answer."""
    began = time.perf_counter()
    found = answer(ids, tokens)
    return time.perf_counter() - began, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="*", default=(12, 100))
    names = ("eager", "growing", "static", "inductor")
    parser.add_argument("--ways", nargs="*", default=names, choices=names)
    options = parser.parse_args()
    tokenizer, model = load()
    text = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    torch._dynamo.config.recompile_limit = 64  # one function is captured for every way
    ways = {name: way(model, name) for name in options.ways}
    for length in options.prompts:
        ids = torch.tensor([text[:length]])
        for name, answer in ways.items():
            print(f"{name}: first answer after {seconds(answer, ids, options.tokens)[0]:.1f} s", flush=True)
            answer(ids, 1)
        first, whole, answers = defaultdict(list), defaultdict(list), {}
        for _ in range(options.rounds):
            for name, answer in ways.items():
                first[name].append(seconds(answer, ids, 1)[0])
                took, answers[name] = seconds(answer, ids, options.tokens)
                whole[name].append(took)
        least = floor(model)
        whole_eager = statistics.median(whole["eager"]) if "eager" in ways else 0.0
        print(f"floor: {1 / least:.1f} tokens/s ({whole_eager / options.tokens / least:.2f} of eager's)", flush=True)
        for name in ways:
            rate, wait = options.tokens / statistics.median(whole[name]), statistics.median(first[name])
            ratio = whole_eager * rate / options.tokens
            agrees = answers[name] == answers.get("eager", answers[name])
            print(
                f"prompt of {length}, {name}: {rate:.1f} tokens/s ({ratio:.2f} of eager's), first token {1e3 * wait:.0f} ms,"
                f" {'eager' if agrees else 'NOT eager'}'s tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
