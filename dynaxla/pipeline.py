"""Once per program: makes an executable of a static graph. Lower, link, compile; or load from disk."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from torch.fx import Graph, Node

from dynaxla.cache.key import Key
from dynaxla.diagnostics import user_frame
from dynaxla.isolation.failures import CompilerFailure
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
from dynaxla.options import Options
from dynaxla.runtime.client import Client, Executable
from dynaxla.runtime.executable_cache import ExecutableCache

logger = logging.getLogger("dynaxla")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Compiles static FX graphs.

    Attributes:
        client: compiles and runs programs on a PJRT device.
        worker: runs torch-mlir's passes in a child process.
        functions: the functions that this process lowered.
        executables: the executables on disk.
        choice: says whether torch-mlir or a body lowers a call.
        tracing: is held while a graph is made or read, since fake tensors and MLIR contexts take one thread at a time; it
            is released while a child process works.
        origin: the graph that Dynamo captured.
    """

    client: Client
    worker: LoweringWorker
    functions: FunctionTable
    executables: ExecutableCache
    choice: LoweringChoice
    tracing: threading.RLock
    recorder: Recorder
    options: Options
    dump: Dump
    origin: CapturedFunction

    def compile(self, graph: Graph, spent: CompileTiming, *, fold: bool = False) -> Executable:
        """Loads the executable of a graph from disk, or compiles it.

        Args:
            graph: all its placeholders and results are tensors of fixed sizes.
            spent: the seconds of lowering and of XLA are added to it.
            fold: whether the graph computes what depends on weights alone.

        Raises:
            LoweringError: torch-mlir rejected the graph, crashed on it, took too long or too much memory.
            LinkError: a body does not give what torch gives.
            CompileError: XLA refused the module, died of it, took too long or too much memory.
            PackageError: a package has no such program, and nothing can be compiled here.
        """
        return self.compile_calls(self.list_calls(graph), spent, fold=fold)

    def compile_calls(self, calls: CallGraph, spent: CompileTiming, *, fold: bool = False) -> Executable:
        """As `compile`, of a graph whose calls are listed, and which may be sharded over a mesh."""
        key = self._graph_key(calls)
        executable = self._load(key, fold, _partitions(calls)) or self._compile(calls, key, spent, fold)
        if self.dump.enabled:
            self.dump.write("hlo", executable.hlo_text())
        return executable

    def key_of(self, graph: Graph) -> Key | None:
        """Returns the key of the graph's executable; None if its calls alone do not determine it."""
        return self._graph_key(self.list_calls(graph))

    def find(self, graph: Graph, *, fold: bool = False) -> Executable | None:
        """Loads the executable of a graph; None if it is not on disk, or its calls alone do not determine it."""
        return self._load(self.key_of(graph), fold)

    def _compile(self, calls: CallGraph, key: Key | None, spent: CompileTiming, fold: bool) -> Executable:
        self.executables.check_compilable()
        self.client.prepare()
        started = time.perf_counter()
        lowered = self._lower(calls)
        lowered_at = time.perf_counter()
        spent.lowering_s += lowered_at - started
        self.recorder.add(lowering_s=lowered_at - started)
        if key is None and self.executables.active:
            key = module_key(lowered.program.encode(), self.options, self.executables.environment(self.client))
            if (found := self._load(key, fold, _partitions(calls))) is not None:
                return found
        executable = self.client.compile(lowered.module, self.options.compile_limits, _partitions(calls))
        compile_s = time.perf_counter() - lowered_at
        spent.compile_s += compile_s
        kind = {"folds": 1} if fold else {"compiles": 1}
        self.recorder.add(**kind, compile_s=compile_s)
        if key is not None:
            self.executables.put(key, executable, compile_s)
        return executable

    def _graph_key(self, calls: CallGraph) -> Key | None:
        if not self.executables.active:
            return None
        return graph_key(calls, self.choice.table, self.options, self.executables.environment(self.client))

    def _load(self, key: Key | None, fold: bool, partitions: int = 1) -> Executable | None:
        """Loads an executable from disk; never where stages are dumped, as a loaded one has none."""
        executable = None if key is None or self.dump.enabled else self.executables.find(key, self.client, partitions)
        if executable is not None:
            self.recorder.add(**({"fold_loads": 1} if fold else {"loads": 1}))
        return executable

    def lower(self, graph: Graph) -> LinkedModule:
        """Makes one StableHLO module of the graph: a function for each distinct call, and `main`, which calls them."""
        return self._lower(self.list_calls(graph))

    def list_calls(self, graph: Graph) -> CallGraph:
        """The graph as calls."""
        if self.dump.enabled:
            self.dump.write("fx", str(graph))
        with self.tracing:
            return call_graph(graph)

    def _lower(self, calls: CallGraph) -> LinkedModule:
        linked = link(calls, self.make_lowering().functions(calls), self.origin.what.partition(" ")[0])
        if self.dump.enabled:
            self.dump.write("stablehlo", linked.text)
        return linked

    def make_lowering(self) -> GraphLowering:
        return GraphLowering(
            choice=self.choice,
            worker=self.worker,
            store=self.functions,
            function_cache=FunctionCache.of(self.executables.store, self.options),
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


def _partitions(calls: CallGraph) -> int:
    """The number of devices of a graph's program."""
    return 1 if calls.sharding is None else calls.sharding.mesh.size
