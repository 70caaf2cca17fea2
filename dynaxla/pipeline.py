"""Once per (part, sizes): a static graph becomes an executable. Import, lower, link, compile."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from torch.fx import Graph, Node

from dynaxla.cache.key import Key
from dynaxla.diagnostics import user_frame
from dynaxla.errors import CompileError
from dynaxla.isolation.failures import CompilerFailure
from dynaxla.lowering.bisect import Culprit, equal_calls, find_first_failing
from dynaxla.lowering.call_graph import CallGraph, call_graph
from dynaxla.lowering.function_cache import FunctionCache
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.graph_lowering import GraphLowering
from dynaxla.lowering.link import LinkedModule, link
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.lowering.program_keys import graph_key, module_key
from dynaxla.observe.compile_timing import CapturedFunction, CompileTiming
from dynaxla.observe.dump import Dump
from dynaxla.observe.recorder import Recorder
from dynaxla.observe.repro import write_repro
from dynaxla.options import Options
from dynaxla.runtime.client import Client, Executable
from dynaxla.runtime.executable_cache import ExecutableCache

logger = logging.getLogger("dynaxla")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The way from a static FX graph to an executable. Everything it needs is handed to it.

    Attributes:
        client: compiles and runs.
        worker: runs torch-mlir's passes in a process of its own.
        functions: what was lowered before.
        kept: executables on disk.
        choice: which nodes torch-mlir lowers and which a body.
        tracing: held by who makes or reads a graph, as fake tensors and MLIR contexts want one thread at a time; not
            while a child process works.
        origin: the graph that Dynamo captured.
    """

    client: Client
    worker: LoweringWorker
    functions: FunctionTable
    kept: ExecutableCache
    choice: LoweringChoice
    tracing: threading.RLock
    recorder: Recorder
    options: Options
    dump: Dump
    origin: CapturedFunction

    def compile(self, graph: Graph, spent: CompileTiming, *, fold: bool = False) -> Executable:
        """An executable of a graph whose placeholders and results are all tensors of fixed sizes: loaded from disk, or
        compiled; `fold` says it is a weight-only one.

        What lowering and XLA take is added to `spent`.

        Raises:
            LoweringError: torch-mlir rejected the graph, crashed on it, took too long or too much memory.
            LinkError: a body does not give what torch gives.
            CompileError: XLA refused the module, died of it, took too long or too much memory.
            PackageError: a package has no such program, and nothing can be compiled here.
        """
        calls = self._calls(graph)
        key = self._graph_key(calls)
        executable = self._kept(key, fold) or self._compile(calls, key, spent, fold)
        if self.dump.enabled:
            self.dump.write("hlo", executable.hlo_text())
        return executable

    def key_of(self, graph: Graph) -> Key | None:
        """Under which key the executable of a graph is kept; None where its calls alone do not determine it."""
        return self._graph_key(self._calls(graph))

    def find(self, graph: Graph, *, fold: bool = False) -> Executable | None:
        """The executable of a graph, if it is on disk and its calls alone determine it."""
        return self._kept(self.key_of(graph), fold)

    def _compile(self, calls: CallGraph, key: Key | None, spent: CompileTiming, fold: bool) -> Executable:
        self.kept.check_compilable()
        self.client.prepare()
        started = time.perf_counter()
        lowered = self._lower(calls)
        lowered_at = time.perf_counter()
        spent.lowering_s += lowered_at - started
        self.recorder.add(lowering_s=lowered_at - started)
        if key is None and self.kept.active:
            key = module_key(lowered.module, self.options, self.kept.environment(self.client))
            if (kept := self._kept(key, fold)) is not None:
                return kept
        executable = self.client.compile(lowered.module, self.options.compile_limits)
        compile_s = time.perf_counter() - lowered_at
        spent.compile_s += compile_s
        kind = {"folds": 1} if fold else {"compiles": 1}
        self.recorder.add(**kind, compile_s=compile_s)
        if key is not None:
            self.kept.put(key, executable, compile_s)
        return executable

    def _graph_key(self, calls: CallGraph) -> Key | None:
        if not self.kept.active:
            return None
        return graph_key(calls, self.choice.table, self.options, self.kept.environment(self.client))

    def _kept(self, key: Key | None, fold: bool) -> Executable | None:
        """The executable on disk. Who wants to see the stages wants them made."""
        executable = None if key is None or self.dump.enabled else self.kept.find(key, self.client)
        if executable is not None:
            self.recorder.add(**({"fold_loads": 1} if fold else {"loads": 1}))
        return executable

    def uncompilable(self, graph: Graph) -> list[Culprit]:
        """The op with which XLA begins to fail on a graph, and its like; none if all of it compiles."""
        failed: list[tuple[LinkedModule, CompileError]] = []

        def compiles(part: Graph) -> bool:
            lowered = self.lower(part)
            try:
                self.client.compile(lowered.module, self.options.compile_limits)
            except CompileError as error:
                failed.append((lowered, error))
                return False
            return True

        node = find_first_failing(graph, compiles)
        if node is None:
            return []
        lowered, error = failed[-1]
        repro = str(write_repro("XLA", lowered.text, str(error)))
        failure = CompilerFailure(str(node.target), error.id, error.explanation, repro)
        return [Culprit(same, failure) for same in equal_calls(graph, node)]

    def unlowerable(self, graph: Graph) -> list[Culprit]:
        """The ops of a graph without bodies that torch-mlir was found to fail on."""
        return [Culprit(node, failure) for node, failure in self.choice.list_failed(graph)]

    def lower(self, graph: Graph) -> LinkedModule:
        """The graph as one pure StableHLO module: a function for each distinct call, and `main`, which calls them.

        A call that torch-mlir fails on, now or before, is its body's.
        """
        return self._lower(self._calls(graph))

    def _calls(self, graph: Graph) -> CallGraph:
        if self.dump.enabled:
            self.dump.write("fx", str(graph))
        with self.tracing:
            return call_graph(graph)

    def _lower(self, calls: CallGraph) -> LinkedModule:
        linked = link(calls, self._lowerer().functions(calls))
        if self.dump.enabled:
            self.dump.write("stablehlo", linked.text)
        return linked

    def _lowerer(self) -> GraphLowering:
        return GraphLowering(
            choice=self.choice,
            worker=self.worker,
            store=self.functions,
            kept=FunctionCache.of(self.kept.store, self.options),
            tracing=self.tracing,
            limits=self.options.lowering_limits,
            platform=self.client.platform,
            precision=self.options.precision,
            report=self._report,
            dump=self.dump,
        )

    def _report(self, node: Node, failure: CompilerFailure) -> None:
        self.recorder.add(lowering_failures=1)
        then = "its body takes it from now on" if self.choice.has_body(node) else "it runs in eager PyTorch"
        where = user_frame(node) or "an unknown line"
        text = "torch-mlir cannot lower a call of %s at %s: %s; %s; repro: %s"
        logger.warning(text, failure.op, where, failure.explanation, then, failure.repro)
