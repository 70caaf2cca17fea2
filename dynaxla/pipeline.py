"""Once per program: makes an executable of a static graph. Lower, link, compile; or load from disk."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial

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
from dynaxla.lowering.mask_segments import tell_segments
from dynaxla.lowering.program_keys import graph_key, module_key
from dynaxla.lowering.spread_values import find_spread
from dynaxla.observe.compile_timing import CapturedFunction, CompileTiming
from dynaxla.observe.dump import Dump
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Options
from dynaxla.runtime.client import Client, Executable
from dynaxla.runtime.executable_cache import ExecutableCache, Make

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
        return self._share_dumped(self._graph_key(calls), partial(self._compile, calls, spent, fold), calls, fold)

    def lower_first(self, calls: CallGraph, spent: CompileTiming) -> Executable | partial[Executable]:
        """The executable of a graph if it is on disk; else lowers the graph, and gives what has XLA compile it, which raises
        what `compile` does and needs no lock of tracing: another thread may call it."""
        key = self._graph_key(calls)
        found = self._load(key, False)
        if found is not None:
            return found
        linked = self._lower_timed(calls, spent)
        make = partial(self._compile_linked, linked, calls, spent, False)
        return partial(self._share_dumped, key, make, calls, False)

    def key_of(self, graph: Graph) -> Key | None:
        """Returns the key of the graph's executable; None if its calls alone do not determine it."""
        return self._graph_key(self.list_calls(graph))

    def find(self, graph: Graph, *, fold: bool = False) -> Executable | None:
        """Loads the executable of a graph; None if it is not on disk, or its calls alone do not determine it."""
        return self._load(self.key_of(graph), fold)

    def _share_dumped(self, key: Key | None, make: Make, calls: CallGraph, fold: bool) -> Executable:
        executable = self._share(key, make, calls, fold)
        if self.dump.enabled:
            self.dump.write("hlo", executable.hlo_text())
        return executable

    def _share(self, key: Key | None, make: Make, calls: CallGraph, fold: bool) -> Executable:
        find = partial(self._load, key, fold, calls.devices)
        return self.executables.share(key, find, make, self.options.compile_timeout_s)

    def _compile(self, calls: CallGraph, spent: CompileTiming, fold: bool, key: Key | None) -> Executable:
        return self._compile_linked(self._lower_timed(calls, spent), calls, spent, fold, key)

    def _lower_timed(self, calls: CallGraph, spent: CompileTiming) -> LinkedModule:
        self.executables.check_compilable()
        self.client.prepare()
        started = time.perf_counter()
        linked = self._lower(calls)
        lowering_s = time.perf_counter() - started
        spent.lowering_s += lowering_s
        self.recorder.add(lowering_s=lowering_s)
        return linked

    def _compile_linked(
        self, linked: LinkedModule, calls: CallGraph, spent: CompileTiming, fold: bool, key: Key | None
    ) -> Executable:
        make = partial(self._finish, linked.module, calls, spent, fold)
        if key is not None or not self.executables.active:
            return make(key)
        made = module_key(linked.program.encode(), self.options, self.executables.environment(self.client))
        return self._share(made, make, calls, fold)

    def _finish(self, module: bytes, calls: CallGraph, spent: CompileTiming, fold: bool, key: Key | None) -> Executable:
        client, limits = self.client, self.options.compile_limits
        executable, compile_s = self.executables.compile(key, client, module, limits, calls.devices)
        spent.compile_s += compile_s
        self.recorder.add(**{"folds" if fold else "compiles": 1}, compile_s=compile_s)
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
            if self.client.platform == "tpu":
                tell_segments(graph)
            return call_graph(graph)

    def _lower(self, calls: CallGraph) -> LinkedModule:
        functions = self.make_lowering().functions(calls)
        # A partitioner for several devices inlines all.
        is_alone = self.client.platform == "cpu" and calls.sharding is None
        apart = find_spread(calls, functions) if is_alone else frozenset()
        linked = link(calls, functions, self.origin.what.partition(" ")[0], apart)
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
