"""Measures which share of the zoo's inference graphs torch-mlir lowers, in nodes and in flops, per model.

    python -m conformance.torch_mlir_share                    # every model, float32
    python -m conformance.torch_mlir_share bert gpt2 resnet   # some
    python -m conformance.torch_mlir_share --missing 30       # and the ops that JAX bodies lower most often

A node is a call of an ATen overload (or of the package's own operators) in the programs that a forward call runs, after
the passes. Not counted are selections of one result among several, arithmetic on sizes, and programs that work on
weights alone, which run once. Flops are those of products, convolutions and attentions, as torch's flop counter counts
them.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

import dynaxla
from dynaxla.explaining.described_parts import count_flops
from dynaxla.pipeline import Pipeline
from tests.zoo.registry import ARCHITECTURES, Architecture, find
from tests.zoo.test_zoo import run


@dataclass
class Share:
    """What was counted: calls and flops by who lowers them; `missing` counts the calls of each op with a JAX body."""

    nodes: int = 0
    nodes_by_torch_mlir: int = 0
    flops: int = 0
    flops_by_torch_mlir: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    missing_flops: Counter[str] = field(default_factory=Counter)

    def add(self, pipeline: Pipeline, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                continue
            work, by_body = count_flops(node), not pipeline.choice.offers(node)
            self.nodes += 1
            self.flops += work
            self.nodes_by_torch_mlir += not by_body
            self.flops_by_torch_mlir += 0 if by_body else work
            if by_body:
                self.missing[named(node)] += 1
                self.missing_flops[named(node)] += work

    def __iadd__(self, other: Share) -> Share:
        self.nodes += other.nodes
        self.nodes_by_torch_mlir += other.nodes_by_torch_mlir
        self.flops += other.flops
        self.flops_by_torch_mlir += other.flops_by_torch_mlir
        self.missing += other.missing
        self.missing_flops += other.missing_flops
        return self

    def __str__(self) -> str:
        of_nodes = f"{_percent(self.nodes_by_torch_mlir, self.nodes)} of {self.nodes:5d} nodes"
        return f"{of_nodes}, {_percent(self.flops_by_torch_mlir, self.flops)} of {self.flops / 1e6:10.2f} Mflop"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:6.1%}" if whole else "   none"


def named(node: Node) -> str:
    """The op of a call and the dtypes of its tensors."""
    dtypes = {str(n.meta["val"].dtype)[6:] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)}
    return f"{node.target} {' '.join(sorted(dtypes))}"


def measure(architecture: Architecture) -> Share:
    """Compiles one forward call of an architecture in float32, and counts."""
    share, compiled = Share(), Pipeline.compile

    def counting(self: Pipeline, graph: Graph, *args: Any, fold: bool = False) -> Any:
        executable = compiled(self, graph, *args, fold=fold)
        if not fold:
            share.add(self, graph)
        return executable

    torch._dynamo.reset()
    built = architecture.build(torch.float32)
    with torch.no_grad():
        run(built)  # some models install hooks at their first call
        with patch.object(Pipeline, "compile", counting):
            run(built, torch.compile(built[0], backend="dynaxla"))
    return share


def _most(share: Share, count: int) -> Iterator[str]:
    for name, times in share.missing.most_common(count):
        yield f"{times:6d} {share.missing_flops[name] / 1e6:10.2f} Mflop  {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of the zoo; default: all")
    parser.add_argument(
        "--missing", type=int, default=0, metavar="N", help="list the N ops most often left to JAX bodies"
    )
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    total = Share()
    failures = dynaxla.read_metrics().lowering_failures
    for architecture in [find(name) for name in given.models] or ARCHITECTURES:
        share = measure(architecture)
        total += share
        print(f"{architecture.name:32s} {share}", flush=True)
    print(f"{'all':32s} {total}")
    if failed := dynaxla.read_metrics().lowering_failures - failures:
        print(f"{failed} calls that torch-mlir was to lower failed and were left to their JAX bodies")
    for line in _most(total, given.missing):
        print(line)


if __name__ == "__main__":
    main()
