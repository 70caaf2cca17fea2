"""Once per (part, sizes): a static graph becomes an executable. Import, lower, link, compile."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from dynaxla.errors import CompileError, LoweringError, LoweringUnavailable
from dynaxla.isolation.failures import Failure
from dynaxla.lowering import mlir
from dynaxla.lowering.choice import Choice
from dynaxla.lowering.expansion import expand
from dynaxla.lowering.importer import ImportedModule, TakesBody, import_graph
from dynaxla.lowering.jax_mlir import artifact_version
from dynaxla.lowering.link import LinkedModule, Linker
from dynaxla.lowering.narrow import Culprit, Narrower, alike, first_failing
from dynaxla.lowering.worker import LoweringWorker
from dynaxla.observe.dump import Dump
from dynaxla.observe.recorder import Recorder
from dynaxla.observe.repro import write_repro
from dynaxla.observe.spent import Origin, Spent
from dynaxla.options import Options
from dynaxla.reasons import user_frame
from dynaxla.runtime.client import Client, Executable

logger = logging.getLogger("dynaxla")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The way from a static FX graph to an executable. Everything it needs is handed to it.

    Attributes:
        client: compiles and runs.
        worker: runs torch-mlir's passes in a process of its own.
        linker: puts JAX-lowered functions into the module.
        choice: which nodes torch-mlir lowers and which a body.
        tracing: held by who makes or reads a graph, as fake tensors and MLIR contexts want one thread at a time; not
            while a child process works.
        origin: the graph that Dynamo captured.
    """

    client: Client
    worker: LoweringWorker
    linker: Linker
    choice: Choice
    tracing: threading.RLock
    recorder: Recorder
    options: Options
    dump: Dump
    origin: Origin

    def compile(self, graph: Graph, spent: Spent, *, fold: bool = False) -> Executable:
        """Compiles a graph whose placeholders and results are all tensors of fixed sizes; `fold` says it is a weight-only one.

        What lowering and XLA take is added to `spent`.

        Raises:
            LoweringError: torch-mlir rejected the graph, crashed on it, took too long or too much memory.
            LinkError: a body does not give what torch gives.
            CompileError: XLA refused the module, died of it, took too long or too much memory.
        """
        started = time.perf_counter()
        lowered = self.lower(graph)
        lowered_at = time.perf_counter()
        executable = self.client.compile(lowered.bytecode, self.options.compile_limits)
        if self.dump.enabled:
            self.dump.write("hlo", executable.hlo_text())
        lowering_s, compile_s = lowered_at - started, time.perf_counter() - lowered_at
        spent.lowering_s += lowering_s
        spent.compile_s += compile_s
        kind = {"folds": 1} if fold else {"compiles": 1}
        self.recorder.add(**kind, lowering_s=lowering_s, compile_s=compile_s)
        return executable

    def uncompilable(self, graph: Graph) -> list[Culprit]:
        """The op with which XLA begins to fail on a graph, and its like; none if all of it compiles."""
        failed: list[tuple[LinkedModule, CompileError]] = []

        def compiles(part: Graph) -> bool:
            lowered = self.lower(part)
            try:
                self.client.compile(lowered.bytecode, self.options.compile_limits)
            except CompileError as error:
                failed.append((lowered, error))
                return False
            return True

        node = first_failing(graph, compiles)
        if node is None:
            return []
        lowered, error = failed[-1]
        repro = str(write_repro("XLA", lowered.text, str(error)))
        failure = Failure(str(node.target), error.id, error.explanation, repro)
        return [Culprit(same, failure) for same in alike(graph, node)]

    def lower(self, graph: Graph) -> LinkedModule:
        """The graph as one pure, linked StableHLO module.

        Where torch-mlir fails on ops that have a body too, the bodies take these ops, here and from now on; where it
        fails on no single op, the bodies take every op that has one.
        """
        if self.dump.enabled:
            self.dump.write("fx", str(graph))
        try:
            if known := self.choice.known_failure(graph):
                raise LoweringError(f"a call of {known.op} is known to fail: {known.explanation}")
            return self._lower(graph, self.choice.by_body)
        except LoweringUnavailable:
            raise  # no op is at fault
        except LoweringError:
            culprits = self.culprits(graph)
            if any(not self.choice.has_body(culprit.node) for culprit in culprits):
                raise
            return self._lower(graph, self.choice.by_body if culprits else self.choice.has_body)

    def culprits(self, graph: Graph) -> list[Culprit]:
        """The ops of a graph that torch-mlir cannot lower even alone, each tried by itself in the worker and remembered."""
        narrower = Narrower(
            failures=self.choice.failures,
            import_one=lambda one: self._import(one, self.choice.by_body),
            lower_one=self._to_stablehlo,
            report=self._report,
            version=artifact_version(),
        )
        return narrower.culprits(self.choice.lowered(graph))

    def _lower(self, graph: Graph, by_body: TakesBody) -> LinkedModule:
        with self.tracing:
            imported = self._import(graph, by_body)
        if self.dump.enabled:
            self.dump.write("torch", imported.text)
        artifact = self._to_stablehlo(imported.bytecode)
        with self.tracing:
            linked = self.linker.link(artifact, imported.calls, self.client.platform, matmul_precision(self.options))
        if self.dump.enabled:
            self.dump.write("stablehlo", linked.text)
        return linked

    def _to_stablehlo(self, module: bytes) -> bytes:
        with self.tracing:  # it imports JAX, the first time: a forked child would wait for an import cut in two
            version = artifact_version()
        return self.worker.lower(module, version, self.options.lowering_limits)

    def _import(self, graph: Graph, by_body: TakesBody) -> ImportedModule:
        try:
            expanded = expand(graph, self.choice.table.forms, lambda node: not by_body(node))
            return import_graph(mlir.load(), expanded.graph, lambda node: node not in expanded.made and by_body(node))
        except (NotImplementedError, TypeError, AssertionError, RuntimeError) as error:
            raise LoweringError(
                explanation=f"torch-mlir's importer refused the graph: {error}",
                hint="DYNAXLA_DEBUG=dump=DIR,stages=fx writes the graph",
            ) from error

    def _report(self, node: Node, failure: Failure) -> None:
        self.recorder.add(lowering_failures=1)
        then = "its body takes it from now on" if self.choice.has_body(node) else "it runs in eager PyTorch"
        where = user_frame(node) or "an unknown line"
        text = "torch-mlir cannot lower a call of %s at %s: %s; %s; repro: %s"
        logger.warning(text, failure.op, where, failure.explanation, then, failure.repro)


def matmul_precision(options: Options) -> str | None:
    """XLA's precision of float32 products; follows torch.get_float32_matmul_precision() unless the options say else."""
    wanted: str = options.matmul_precision
    if wanted == "torch":
        wanted = {"highest": "highest", "high": "high", "medium": "default"}[torch.get_float32_matmul_precision()]
    return None if wanted == "default" else wanted.upper()
