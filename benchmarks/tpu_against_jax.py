"""Compares programs with those of the same models written in JAX, by the real TPU compiler, without a TPU.

    python -m benchmarks.tpu_against_jax [--target tpu:v5e:1x1] [--only inference|training] [MODEL ...]

Needs libtpu and torchax. Models are those of benchmarks/tpu_models.py: usual widths, few layers, bfloat16. JAX's side is
torchax's trace of the same module (benchmarks/torchax_trace.py). A training step is one program on both sides: the mean of the
result and its gradients of the parameters. Of each program: XLA's count of flops and of bytes accessed, bytes of temporaries,
the fusions, copies and transposes in the compiled program, and the sum of the cycles that the compiler estimates for its
instructions; "ratio" is ours divided by JAX's.

XLA counts no flops of kernels, no cycles either, and a loop once. `--attention whole` compiles ours with attention as one
product of all queries and keys, as JAX's side has it, so that flops can be compared.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dynaxla
from benchmarks.tpu_models import MODELS, Built, build
from dynaxla.bench.answers import Check
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.records import BackendResult, CaseResult
from dynaxla.errors import CompileError
from dynaxla.ops import attention, splash_attention
from dynaxla.options import Limits
from dynaxla.runtime.executable_info import MemoryUse
from dynaxla.targets.registry import compiler_for

LIMITS = Limits(1200.0, 12 << 30)
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([\w-]+)\(")
_FUSED = re.compile(r"calls=%?([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class TrainingStep(nn.Module):
    """The mean of a model's result, and its gradients of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            mean = self.model(*arguments).float().mean()
            return mean.detach(), *torch.autograd.grad(mean, list(self.model.parameters()))


def count_instructions(hlo: str) -> dict[str, float]:
    """Fusions, copies and transposes of a compiled program, and the cycles that the compiler estimates, in millions."""
    fused, counted, cycles, computation = set(_FUSED.findall(hlo)), Counter[str](), 0, ""
    for line in hlo.splitlines():
        if named := _COMPUTATION.match(line):
            computation = named[1]
        elif found := _INSTRUCTION.match(line):
            counted[found[1]] += found[1] == "transpose" or computation not in fused
            cycles += sum(map(int, _CYCLES.findall(line))) if computation not in fused else 0
    copies = counted["copy"] + counted["copy-start"]
    return {
        "fusions": counted["fusion"],
        "copies": copies,
        "transposes": counted["transpose"],
        "Mcycles": cycles / 1e6,
    }


def state_facts(cost: Mapping[str, float], memory: MemoryUse, hlo: str) -> dict[str, float]:
    return {
        "GFLOP": cost["flops"] / 1e9,
        "MB accessed": cost["bytes accessed"] / 1e6,
        "temporary, MB": memory.temporaries_bytes / 1e6,
        **count_instructions(hlo),
    }


def compile_ours(built: Built, target: str, *, train: bool) -> dict[str, float]:
    """The facts of all programs of a call together; what the call writes is donated, as on a live device."""
    with FakeTensorMode():
        arguments = [torch.empty(each.shape, dtype=each.dtype, device="dynaxla") for each in built.arguments]
    model = TrainingStep(built.model) if train else built.model
    options = {"fallback": "error", "compile_timeout_s": LIMITS.seconds}
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        reports = dynaxla.compile_for_target(model, arguments, target=target, options=options)
    total: Counter[str] = Counter()
    for report in reports:
        cost = {"flops": report.flops, "bytes accessed": report.accessed_bytes}
        # What depends on weights alone runs once per version of the weights.
        if report.kind != "weights" and report.hlo_text is not None:
            total.update(state_facts(cost, report.memory, report.hlo_text()))
    return dict(total)


def compile_jax(name: str, target: str, *, train: bool) -> dict[str, float]:
    """
    Raises:
        CompileError: torchax cannot trace the model, or is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "module.mlir"
        command = [sys.executable, "-m", "benchmarks.torchax_trace", name, str(file), *["--train"] * train]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"torchax does not trace {name}: {done.stderr.strip().splitlines()[-1]}")
        program = compiler_for(target)[1].compile(file.read_bytes(), LIMITS)
    return state_facts(program.cost(), program.memory_use(), program.hlo_text())  # type: ignore[attr-defined]


def compare(name: str, given: argparse.Namespace, *, train: bool) -> CaseResult:
    torch._dynamo.reset()
    started, built = time.perf_counter(), build(name)
    results = []
    for backend in ("dynaxla", "jax"):
        try:
            facts = (
                compile_jax(name, given.target, train=train)
                if backend == "jax"
                else compile_ours(built, given.target, train=train)
            )
            results.append(BackendResult(backend, facts=facts))
        except CompileError as error:
            results.append(BackendResult(backend, Check("failed", message=str(error).splitlines()[0])))
    ours, theirs = (result.facts for result in results)
    ratios = {fact: ours[fact] / theirs[fact] for fact in ours if theirs.get(fact)}
    what = "a training step" if train else "inference"
    about = f"{what}, {given.target}, {time.perf_counter() - started:.0f} s in all"
    return CaseResult(f"{name}, {what}", [*results, BackendResult("ratio", facts=ratios)], baseline="jax", about=about)


def attend_at_once() -> ExitStack:
    """Attention is one product of all queries and keys, whatever its size."""
    stack = ExitStack()
    for module, name in ((splash_attention, "_LEAST_SCORES_BYTES"), (attention, "_MAX_SCORES_BYTES")):
        stack.enter_context(mock.patch.object(module, name, sys.maxsize))
    return stack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[], help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--target", default="tpu:v5e:1x1")
    parser.add_argument("--only", choices=["inference", "training"])
    parser.add_argument("--attention", choices=["default", "whole"], default="default")
    add_run_arguments(parser)
    given = parser.parse_args()
    names: list[Any] = given.models or list(MODELS)
    modes = {"inference": [False], "training": [True], None: [False, True]}[given.only]
    cases = [
        (name, train) for name in names for train in modes if not train or MODELS[name] is not MODELS["llama-decode"]
    ]
    dynaxla.use("cpu")  # makes the device "dynaxla"
    with BenchSession(given, len(cases)) as session, attend_at_once() if given.attention == "whole" else ExitStack():
        for name, train in cases:
            session.add(compare(name, given, train=train))
    return session.status


if __name__ == "__main__":
    sys.exit(main())
