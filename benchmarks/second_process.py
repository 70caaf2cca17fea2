"""The first call of a model in a process that finds nothing on disk, and in the processes behind it.

    python -m benchmarks.second_process                       # bert-base, resnet50 and a 4-layer encoder with 8 buckets
    python -m benchmarks.second_process bert-base --rounds 3

Each process has its imports and its model when the clock starts. The caches, ours and torch's, are in a folder of their own,
removed afterwards; the best of the rounds is told. Of a round the first process is cold; the second finds programs, and with
--captures AOTAutograd's captures; with --precompile a last one finds Dynamo's captures too (`caching_precompile`), which
another saved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from dynaxla.isolation.disk import CACHE_VARIABLE

MODELS = ("bert-base", "resnet50", "encoder")
CHILD = """
import json, sys, time, torch, dynaxla
from benchmarks import second_process
model, calls = second_process.build(sys.argv[1])
torch.compile(torch.nn.Linear(2, 2), backend="dynaxla", options={"cache": False})(torch.ones(2, 2))  # what a process does once
torch._dynamo.config.caching_precompile = sys.argv[2] != "no"
before = dynaxla.read_metrics()
started = time.perf_counter()
with torch.no_grad():
    compiled = torch.compile(model, backend="dynaxla", options={"captures": sys.argv[3] == "captures"})
    for args in calls:
        compiled(*args)
took = time.perf_counter() - started
after = dynaxla.read_metrics()
names = ("lowering_s", "compile_s", "executables", "loads", "captures_loaded")
spent = {name: getattr(after, name) - getattr(before, name) for name in names}
if sys.argv[2] == "save":
    torch.compiler.save_cache_artifacts()
print(json.dumps({"took_s": took, **spent}))
"""


def build(name: str) -> tuple[object, list[tuple[object, ...]]]:
    """A model, and the arguments of its calls."""
    import torch
    from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    if name == "resnet50":
        return ResNetForImageClassification(ResNetConfig()).eval(), [(torch.randn(1, 3, 224, 224),)]
    if name == "bert-base":
        return BertModel(BertConfig()).eval(), [(torch.randint(0, 30000, (1, 128)),)]
    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    sizes = [(2, 8), (3, 20), (5, 40), (5, 100), (7, 200), (2, 200), (2, 400), (7, 20)]
    return BertModel(config).eval(), [(torch.randint(0, 30000, size),) for size in sizes]


def first_call(model: str, folder: str, captures: bool, precompile: str = "no") -> dict[str, float]:
    """What the calls take in a process of their own, in seconds, and what was compiled or found.

    Args:
        captures: whether AOTAutograd's are kept.
        precompile: whether Dynamo keeps its captures: "no", or it does, and "save" or "load" them.
    """
    environ = {**os.environ, CACHE_VARIABLE: f"{folder}/own", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
    command = [sys.executable, "-c", CHILD, model, precompile, "captures" if captures else "none"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--captures", action="store_true")
    parser.add_argument("--precompile", action="store_true")
    given = parser.parse_args()
    for model in given.models or MODELS:
        cold, warm, precompiled = [], [], []
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(first_call(model, folder, given.captures))
                warm.append(first_call(model, folder, given.captures))
                if given.precompile:
                    first_call(model, folder, given.captures, "save")
                    precompiled.append(first_call(model, folder, given.captures, "load"))
        for what, found in (("cold", cold), ("warm", warm), ("precompiled", precompiled)):
            if not found:
                continue
            best = min(found, key=lambda one: one["took_s"])
            rounded = ", ".join(f"{name} {value:.2f}".removesuffix(".00") for name, value in best.items())
            print(f"{model:10s} {what}: {rounded}", flush=True)


if __name__ == "__main__":
    main()
