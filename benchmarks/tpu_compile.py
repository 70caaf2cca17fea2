"""Prints what models cost on a TPU chip, by the real TPU compiler, on a machine without a TPU. Needs libtpu.

    python -m benchmarks.tpu_compile [--target tpu:v5e:1x1] [MODEL ...]

A model is a name of tests/zoo (small, random weights), or "bert-base" or "resnet50" (real size). Prints one line per
program: compile seconds, flops, bytes accessed, the least time on the chip, memory against the chip's HBM.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from dynaxla import ProgramReport, compile_for_target, read_metrics
from dynaxla.bench.answers import Check
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.built_in_models import BUILT_IN
from dynaxla.bench.records import BackendResult, CaseResult
from tests.zoo.registry import find

SMALL = (
    "bert",
    "gpt2",
    "llama",
    "t5",
    "mamba",
    "mixtral",
    "vit",
    "convnext",
    "unet-2d-condition",
    "dit",
    "whisper",
    "clip",
)
LARGE = ("bert-base", "resnet50")


def describe_program(report: ProgramReport) -> BackendResult:
    """A program as a line of the record."""
    facts = {
        "ops": float(report.ops),
        "compile, s": report.compile_s,
        "GFLOP": report.flops / 1e9,
        "MB accessed": report.accessed_bytes / 1e6,
        "MB": report.memory.total_bytes / 1e6,
    }
    if report.roofline is not None:
        facts |= {"of HBM, MB": report.hbm_bytes / 1e6, "least, us": report.roofline.seconds * 1e6}
    check = Check("unchecked") if report.fits else Check("failed", message="it does not fit the chip")
    return BackendResult(report.name, check, facts=facts)


def compile_model(name: str, target: str) -> CaseResult:
    torch._dynamo.reset()
    model, args, kwargs = BUILT_IN[name]() if name in BUILT_IN else find(name).build(torch.float32)
    started, before = time.perf_counter(), read_metrics().fallbacks
    reports = compile_for_target(model.eval(), args, kwargs, target=target)
    seconds, eager = time.perf_counter() - started, read_metrics().fallbacks[len(before) :]
    about = "; ".join([f"{len(reports)} program(s) in {seconds:.1f} s for {target}", *eager])
    return CaseResult(name, [describe_program(report) for report in reports], baseline="", about=about)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[*SMALL, *LARGE])
    parser.add_argument("--target", default="tpu:v5e:1x1")
    add_run_arguments(parser)
    given = parser.parse_args()
    with BenchSession(given, len(given.models)) as session:
        for name in given.models:
            session.add(compile_model(name, given.target))
    return session.status


if __name__ == "__main__":
    sys.exit(main())
