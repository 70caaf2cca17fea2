"""Prints what models cost on a TPU chip, by the real TPU compiler, on a machine without a TPU. Needs libtpu.

    python -m benchmarks.tpu_compile [--target tpu:v5e:1x1] [MODEL ...]

A model is a name of tests/zoo (small, random weights), or "bert-base" or "resnet50" (real size). Prints one line per
program: compile seconds, flops, bytes accessed, the least time on the chip, memory against the chip's HBM.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.steady_state import MODELS
from dynaxla import ProgramReport, compile_for_target, read_metrics
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


def _least(report: ProgramReport) -> str:
    roofline = report.roofline
    return "" if roofline is None else f"{roofline.seconds * 1e6:.1f} us by {roofline.bound}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[*SMALL, *LARGE])
    parser.add_argument("--target", default="tpu:v5e:1x1")
    given = parser.parse_args()
    for name in given.models:
        torch._dynamo.reset()
        model, args, kwargs = MODELS[name]() if name in MODELS else find(name).build(torch.float32)
        started, before = time.perf_counter(), read_metrics().fallbacks
        reports = compile_for_target(model.eval(), args, kwargs, target=given.target)
        seconds = time.perf_counter() - started
        print(
            f"{name}: {len(reports)} program(s) in {seconds:.1f} s",
            *read_metrics().fallbacks[len(before) :],
            sep="\n  ",
        )
        for report in reports:
            megabytes, chip = report.memory.total_bytes / 1e6, report.hbm_bytes / 1e9
            print(
                f"  {report.name:20} {report.ops:5} ops  compile {report.compile_s:6.1f} s  {report.flops / 1e9:9.3f} GFLOP  "
                f"{report.accessed_bytes / 1e6:9.1f} MB accessed  {_least(report):>20}  {megabytes:8.1f} MB of {chip:.1f} GB"
                f"{'' if report.fits else '  DOES NOT FIT'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
