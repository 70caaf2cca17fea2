"""Lowers the calls of a graph to StableHLO functions: from the caches, by torch-mlir, or by a JAX body."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from dynaxla.errors import LoweringError
from dynaxla.isolation.failures import CompilerFailure
from dynaxla.lowering import stablehlo_module
from dynaxla.lowering.call_graph import CallGraph, OpCall
from dynaxla.lowering.function_cache import FunctionCache, is_own
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.jax_lowering import lower_bodies
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.lowering.shape_templates import ShapeTemplates
from dynaxla.lowering.stablehlo_functions import FunctionFinisher, FunctionKey, StablehloFunction
from dynaxla.lowering.torch_mlir_lowering import Calls, TorchMlirLowering
from dynaxla.observe.dump import Dump
from dynaxla.ops.record import Body
from dynaxla.options import Limits


@dataclass(frozen=True, slots=True)
class GraphLowering:
    """Lowers calls, each distinct one once.

    Attributes:
        choice: decides between torch-mlir and a body.
        worker: runs torch-mlir's passes in a process of its own.
        store: functions lowered in this process.
        function_cache: functions on disk.
        tracing: held while graphs are made and modules read, not while the worker works.
        limits: time and memory limits of one request to the worker.
        platform: the platform to lower for, by JAX's name.
        precision: of float32 products: "DEFAULT", "HIGH" or "HIGHEST"; None leaves them alone.
        report: called with each call on which torch-mlir fails.
    """

    choice: LoweringChoice
    worker: LoweringWorker
    store: FunctionTable
    function_cache: FunctionCache
    tracing: threading.RLock
    limits: Limits
    platform: str
    precision: str | None
    report: Callable[[Node, CompilerFailure], None]
    dump: Dump

    def functions(self, graph: CallGraph) -> dict[str, StablehloFunction]:
        """The functions of a graph's calls, by key.

        Raises:
            LoweringError: torch-mlir fails on a call that has no body, or the child process cannot start.
            LinkError: a body's result differs from torch's in shape or dtype.
        """
        with self.tracing:
            stablehlo_module.load()  # it imports JAX, the first time: a forked child would wait for an import cut in two
            offered = [each for each in graph.distinct.values() if self.choice.offers(each[1])]
        found = self._by_torch_mlir(offered)
        left = {key: each for key, each in graph.distinct.items() if key not in found}
        for call, node in left.values():
            if not self.choice.has_body(node):
                raise LoweringError(f"torch-mlir fails on a call of {call.target}, which has no body")
        with self.tracing:
            found |= self._by_bodies([call for call, _ in left.values()], is_sharded=graph.sharding is not None)
            if graph.sharding is None:
                return found
            finisher = self._finisher
            return {key: finisher.finish_for_mesh(found[key], call) for key, (call, _) in graph.distinct.items()}

    def _by_torch_mlir(self, calls: Calls) -> dict[str, StablehloFunction]:
        table, failures = self.choice.table, self.choice.failures
        offering = TorchMlirLowering(self.worker, table.forms, failures, self.report, self.limits, self.tracing)
        if self.dump.wants("torch"):
            self.dump.write("torch", offering.text([node for _, node in calls]))
        with self.tracing:
            known = {call.key: self._known(None, call) for call, _ in calls}
        new = [(call, node) for call, node in calls if known[call.key] is None]
        for call, function in offering.lower(new, self._finisher):
            known[call.key] = function
            self._keep(None, call, function)
        return {key: function for key, function in known.items() if function is not None}

    def _by_bodies(self, calls: Sequence[OpCall], *, is_sharded: bool) -> dict[str, StablehloFunction]:
        records = self.choice.table.records
        bodies = {call.key: records[call.target].body_on(self.platform, is_sharded=is_sharded) for call in calls}
        known = {call.key: self._known(bodies[call.key], call) for call in calls}
        new = [(bodies[call.key], call) for call in calls if known[call.key] is None]
        for (body, call), function in zip(new, lower_bodies(new, self._finisher) if new else (), strict=True):
            known[call.key] = function
            self._keep(body, call, function)
        return {key: function for key, function in known.items() if function is not None}

    def _known(self, body: Body | None, call: OpCall) -> StablehloFunction | None:
        """A function from the cache of the process or of the disk, or instantiated from shape templates; None if
        there is none."""
        here, key = self.store.functions_of(body), self._key(call)
        if key in here:
            return here[key]
        resizer = self._resizer(body, call)
        found = None if resizer is None else resizer.function(call, self._finisher)
        if found is None:
            found = self.function_cache.find(call.target, body, key)
            if found is not None and resizer is not None:
                resizer.learn(call, found, self._finisher)
        if found is not None:
            here[key] = found
        return found

    def _keep(self, body: Body | None, call: OpCall, function: StablehloFunction) -> None:
        self.store.functions_of(body)[self._key(call)] = function
        if (resizer := self._resizer(body, call)) is not None:
            resizer.learn(call, function, self._finisher)
        self.function_cache.put(call.target, body, self._key(call), function)

    def _resizer(self, body: Body | None, call: OpCall) -> ShapeTemplates | None:
        """The shape templates; None for a body of the user's, which may do anything with a size."""
        return self.store.resizer(body) if is_own(call.target, body) else None

    def _key(self, call: OpCall) -> FunctionKey:
        return self.platform, self.precision, call.key

    @property
    def _finisher(self) -> FunctionFinisher:
        return FunctionFinisher(stablehlo_module.load(), self.platform, self.precision)
