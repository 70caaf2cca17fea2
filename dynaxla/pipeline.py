"""Once per (part, sizes): a static graph becomes an executable. Import, lower, link, compile."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.fx import Graph

from dynaxla.debug.dump import Dump
from dynaxla.errors import LoweringError
from dynaxla.lowering import mlir
from dynaxla.lowering.importer import ImportedModule, import_graph
from dynaxla.lowering.isolation import LoweringWorker
from dynaxla.lowering.link import Linker, artifact_version
from dynaxla.lowering.narrow import Culprit, find_culprits
from dynaxla.metrics.recorder import Recorder
from dynaxla.options import Options
from dynaxla.ops.registry import rule_targets
from dynaxla.runtime.client import Client, Executable
from dynaxla.specs import TensorSpec
from dynaxla.stages import LoweredModule


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The way from a static FX graph to an executable. Everything it needs is handed to it.

    Attributes:
        client: compiles and runs.
        worker: runs torch-mlir's passes in a process of its own.
        linker: puts JAX-lowered functions into the module.
    """

    client: Client
    worker: LoweringWorker
    linker: Linker
    recorder: Recorder
    options: Options
    dump: Dump

    def compile(self, graph: Graph, *, fold: bool = False) -> Executable:
        """Compiles a graph whose placeholders and results are all tensors of fixed sizes; `fold` says it is a weight-only one.

        Raises:
            LoweringError: torch-mlir rejected the graph, crashed on it, took too long or too much memory.
            LinkError: a JAX rule does not give what torch gives.
            CompileError: XLA refused the module.
        """
        started = time.perf_counter()
        lowered = self.lower(graph)
        lowered_at = time.perf_counter()
        executable = self.client.compile(lowered.bytecode)
        if self.dump.enabled:
            self.dump.write("hlo", executable.hlo_text())
        kind = {"folds": 1} if fold else {"compiles": 1}
        self.recorder.add(**kind, lowering_s=lowered_at - started, compile_s=time.perf_counter() - lowered_at)
        return executable

    def lower(self, graph: Graph) -> LoweredModule:
        """The graph as one pure, linked StableHLO module."""
        if self.dump.enabled:
            self.dump.write("fx", str(graph))
        imported = self._import(graph)
        if self.dump.enabled:
            self.dump.write("torch", imported.text)
        artifact = self.worker.lower(imported.bytecode, artifact_version(), self.options.lowering_timeout_s)
        linked = self.linker.link(artifact, imported.calls, self.client.platform, matmul_precision(self.options))
        if self.dump.enabled:
            self.dump.write("stablehlo", linked.text)
        arguments = tuple(TensorSpec.from_tensor(n.meta["val"]) for n in graph.nodes if n.op == "placeholder")
        return LoweredModule(linked.bytecode, linked.text, arguments)

    def culprits(self, graph: Graph) -> list[Culprit]:
        """The ops of a graph that torch-mlir cannot lower even alone, each tried by itself in the worker."""
        return find_culprits(
            graph, rule_targets(), self._import, lambda module: self.worker.lower(module, artifact_version())
        )

    def _import(self, graph: Graph) -> ImportedModule:
        try:
            return import_graph(mlir.load(), graph, rule_targets())
        except (NotImplementedError, TypeError, AssertionError, RuntimeError) as error:
            raise LoweringError(
                explanation=f"torch-mlir's importer refused the graph: {error}",
                hint="DYNAXLA_DEBUG=dump=DIR,stages=fx writes the graph",
            ) from error


def matmul_precision(options: Options) -> str | None:
    """XLA's precision of float32 products; follows torch.get_float32_matmul_precision() unless the options say else."""
    wanted = options.matmul_precision
    if wanted == "torch":
        wanted = {"highest": "highest", "high": "high", "medium": "default"}[torch.get_float32_matmul_precision()]
    return None if wanted == "default" else wanted.upper()
