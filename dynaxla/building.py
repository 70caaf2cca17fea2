"""From a graph of AOTAutograd's to what runs it: passes, partition, parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from dynaxla.bucketing.sizing import Policies
from dynaxla.capture.seeds import seeded
from dynaxla.dispatch import CompiledPart
from dynaxla.freezing import Gate
from dynaxla.observe.dump import Dump
from dynaxla.observe.spent import Origin
from dynaxla.ops.table import OpTable
from dynaxla.options import Options
from dynaxla.partition.boundary import Boundary
from dynaxla.partition.parts import MakePart, PartBuilder
from dynaxla.partition.support import graph_refusal, tensors_of
from dynaxla.passes.graph import CapturedGraph, Setting, apply, write
from dynaxla.passes.order import FOR_ALL, FOR_PARTS
from dynaxla.pipeline import Pipeline
from dynaxla.process import Process
from dynaxla.programs import copied, in_eager
from dynaxla.runtime.bundle import Bundle
from dynaxla.runtime.kept import KeptExecutables
from dynaxla.targets.registry import connect
from dynaxla.targets.target import Target
from dynaxla.torch_api.aot import boxed
from dynaxla.torch_api.modules import graph_module

GraphFunction = Callable[[list[Any]], list[Any]]
MakePartFor = Callable[[Pipeline, Policies], MakePart]


@dataclass(frozen=True, slots=True)
class GraphBuilder:
    """Builds what runs for the graphs that AOTAutograd makes of one Dynamo graph.

    Attributes:
        shared: what the process's graphs share.
        options: the user's.
        policies: the buckets of the graphs' sizes.
        gate: says what a call does whose program is not compiled yet.
        origin: Dynamo's graph.
        target: overrides what the tensors' devices choose.
        client: overrides the target's client.
        make_part: overrides what a compilable part becomes; by default a `CompiledPart`.
        bundle: the programs of a package, which this is made for or made of.
    """

    shared: Process
    options: Options
    policies: Policies
    gate: Gate
    origin: Origin
    target: Target | None = None
    client: Any = None
    make_part: MakePartFor | None = None
    bundle: Bundle | None = None

    def build(self, graph: CapturedGraph) -> GraphFunction:
        """What runs for a graph, which it changes; what cannot be compiled is left to eager PyTorch."""
        self.shared.recorder.add(graphs=1)
        boundary = Boundary(self.shared.recorder, self.options)
        module, compiles = graph.module, self.options.executor != "eager"
        setting = Setting(self.target, _device(module), self.options, self.shared.region_numbers)
        debug = self.options.debug
        dump = Dump(debug.dump if compiles else None, debug.stages)
        write(dump, "captured", graph)
        graph = apply(FOR_ALL, graph, setting, dump)
        refused = graph_refusal(module)
        if refused is not None and compiles:
            boundary.leave(refused, module)
        elif compiles:
            try:
                return self._parts(replace(graph, module=graph_module(module, copied(module.graph))), setting, dump)
            except Exception as error:  # the border of a captured graph, see partition/boundary.py
                boundary.take(error, "a captured graph", module)
        return boxed(in_eager(module, graph.saved))

    def _parts(self, graph: CapturedGraph, setting: Setting, dump: Dump) -> GraphFunction:
        """Takes a graph through the passes, in place, and cuts it into parts."""
        graph = apply(FOR_PARTS, graph, setting, dump)
        pipeline = self.pipeline(graph.table, setting, dump)
        builder = PartBuilder(
            pipeline, setting.device, (self.make_part or self._compiled_part)(pipeline, self.policies)
        )
        weights = sorted(graph.static_inputs)
        function = builder.build(graph.module, weights, graph.constants, graph.refused, graph.saved)
        function = seeded(function, graph.seeds)
        return boxed(function if graph.aliases is None else graph.aliases.around(function))

    def pipeline(self, table: OpTable, setting: Setting, dump: Dump) -> Pipeline:
        """The way from static graphs to executables.

        Args:
            table: what is known of the graphs' ops.
        """
        shared, client = self.shared, self.client or connect(setting.target)
        return Pipeline(
            client=client,
            worker=shared.worker,
            functions=shared.functions,
            kept=self._kept(),
            choice=replace(shared.choice, table=table, platform=client.platform),
            tracing=shared.tracing,
            recorder=shared.recorder,
            options=self.options,
            dump=dump,
            origin=self.origin,
        )

    def _kept(self) -> KeptExecutables:
        kept = self.shared.kept if self.options.cache else KeptExecutables(None)
        return kept if self.bundle is None else replace(kept, bundle=self.bundle)

    def _compiled_part(self, pipeline: Pipeline, policies: Policies) -> MakePart:
        watch, behind = self.shared.watch, self.shared.behind
        return lambda graphs: CompiledPart(graphs, pipeline, watch, policies, self.current_gate, behind)

    def current_gate(self) -> Gate:
        """The gate of the function that is being called."""
        return self.shared.gates.calling() or self.gate


def _device(module: GraphModule) -> torch.device:
    """The device the graph computes on: an accelerator if any tensor is on one."""
    values = [v for n in module.graph.nodes for v in tensors_of(n)]
    away = [v.device for v in values if v.device.type not in ("cpu", "meta")]
    return away[0] if away else torch.device("cpu")
