"""Prints what a step and a prompt of language models cost on a TPU chip, by the real TPU compiler, without a TPU.

    python -m benchmarks.tpu_llm [--targets tpu:v5e:1x1 ...] [--models smollm2 llama-1b llama-8b] [--rows 1 16] [--room 2048]
    python -m benchmarks.tpu_llm --models llama-8b --targets tpu:v5p:2x2x2 --mesh model=8

Needs libtpu. Weights are on "meta" and caches fake, bfloat16 tensors of the device: an 8B takes no memory here. A
step's program reads one token per row and writes its keys and values into a static cache, whose memory is donated; a
prompt's program reads 512 tokens of one row. Of each program: compile seconds, memory, the least time on the
chip, and tokens per second at that time. The least time uses XLA's count of bytes, which has bytes that are prefetched
into the chip's own memory twice, and the whole table of embeddings where one row is read. So the tokens per second of
reading every argument once are printed too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

import dynaxla
from dynaxla.bench.answers import Check
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.records import BackendResult, CaseResult
from dynaxla.errors import CompileError
from dynaxla.precompile.program_report import ProgramReport

TARGETS = ("tpu:v5e:1x1", "tpu:v5p:1x1x1")

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "head_dim": 128,
    },
    "llama-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
        "head_dim": 128,
    },
}


def _rules(mesh: str, rows: int) -> str:
    """Tensor parallel over `model`, with the heads of caches split as those of the projections that write them. An axis `data`
    splits rows."""
    batch = "data" if "data=" in mesh and rows > 1 else "-"
    return f"tp_plan; *_ids={batch}; past_key_values.*.keys={batch},model; past_key_values.*.values={batch},model"


def program(
    shape: Mapping[str, Any], target: str, rows: int, tokens: int, room: int, mesh: str | None = None
) -> ProgramReport:
    """The program of a call: `tokens` of each of `rows`, and caches of `room` places."""
    config = LlamaConfig(**shape, max_position_embeddings=room, dtype=torch.bfloat16)
    with torch.device("meta"), torch.no_grad():
        net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with FakeTensorMode(), torch.device("dynaxla"), torch.no_grad():  # a cache keeps the name of its device
        cache = StaticCache(config=config, max_cache_len=room)
        one = torch.zeros(rows, config.num_key_value_heads, 1, config.head_dim, dtype=torch.bfloat16)
        for layer in cache.layers:
            layer.lazy_initialization(one, one)
    with torch.device("dynaxla"):
        call = {
            "input_ids": torch.ones(rows, tokens, dtype=torch.long),
            "position_ids": torch.arange(tokens)[None].expand(rows, tokens),
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        (report,) = dynaxla.compile_for_target(
            net,
            (),
            call,
            target=target,
            options={"fallback": "error"},
            mesh=mesh,
            shard="" if mesh is None else _rules(mesh, rows),
        )
    return report


def describe(report: ProgramReport, tokens: int) -> dict[str, float]:
    """The facts of a program that makes so many tokens."""
    assert report.roofline is not None
    assert report.chip is not None
    seconds, memory = report.roofline.seconds, report.memory
    once = max(report.roofline.compute_s, memory.arguments_bytes / report.chip.hbm_bytes_per_s)
    facts = {
        "compile, s": report.compile_s,
        "GB": memory.total_bytes / 1e9,
        "of HBM, GB": report.hbm_bytes / 1e9,
        "temporary, MB": memory.temporaries_bytes / 1e6,
        "donated, MB": memory.aliased_bytes / 1e6,
        "least, ms": seconds * 1e3,
        "tokens/s": tokens / seconds,
        "read once, ms": once * 1e3,
        "read once, tokens/s": tokens / once,
    }
    if report.devices > 1 and report.communication_s is not None:
        facts["sent, MB"] = report.sent_bytes / 1e6
        facts["collectives"] = float(len(report.collectives))
        facts["communication, us"] = report.communication_s * 1e6
        facts["compute, us"] = report.roofline.compute_s * 1e6
    return facts


def compile_call(name: str, target: str, rows: int, tokens: int, given: argparse.Namespace) -> BackendResult:
    torch._dynamo.reset()
    title = f"{rows} x {tokens}"
    try:
        report = program(SHAPES[name], target, rows, tokens, given.room, given.mesh)
    except CompileError as error:  # as where a chip has no room for it
        return BackendResult(title, Check("failed", message=str(error).splitlines()[0]))
    check = Check("unchecked") if report.fits else Check("failed", message="it does not fit the chip")
    return BackendResult(title, check, facts=describe(report, rows * tokens))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--models", nargs="+", default=["smollm2", "llama-1b", "llama-8b"], choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16], help="of a step (default: 1 16)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt; 0: none (default: %(default)s)")
    parser.add_argument("--room", type=int, default=2048, help="tokens of a row's cache (default: %(default)s)")
    parser.add_argument("--mesh", help="partition over it, tensor parallel over its axis `model`: model=8")
    add_run_arguments(parser)
    given = parser.parse_args()
    dynaxla.use("cpu")
    calls = [*((rows, 1) for rows in given.rows), *([(1, given.prompt)] * bool(given.prompt))]
    with BenchSession(given, len(given.models) * len(given.targets)) as session:
        for name in given.models:
            for target in given.targets:
                started = time.perf_counter()
                results = [compile_call(name, target, *call, given) for call in calls]
                about = f"{target}, {time.perf_counter() - started:.0f} s in all"
                session.add(CaseResult(f"{name}, {target}", results, baseline="", about=about))
    return session.status


if __name__ == "__main__":
    sys.exit(main())
