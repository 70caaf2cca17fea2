"""Compiling for a device that is not here: what a model's graphs cost on a TPU, from a machine without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from dynaxla.backend import GraphCompiler, process
from dynaxla.dispatch import PartFunction, PartGraphs
from dynaxla.errors import TargetError
from dynaxla.options import Options
from dynaxla.pipeline import Pipeline
from dynaxla.runtime.client import MemoryUse
from dynaxla.runtime.pjrt import PjrtTopology

# Memory of one chip in bytes, from Google's published system architecture of each generation.
HBM_BYTES = {"v4": 32 << 30, "v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30}


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One program, compiled for a target that is not here.

    Attributes:
        name: "graph 0 part 0" and so on; the weight-only program of a part is its "weights".
        ops: nodes of the ATen graph.
        lowering_s, compile_s: seconds in torch-mlir and JAX, and in the target's compiler.
        flops, accessed_bytes: XLA's cost analysis; 0 where it has none.
        memory: what the program needs on the chip.
        hbm_bytes: what the chip has.
    """

    name: str
    ops: int
    lowering_s: float
    compile_s: float
    flops: float
    accessed_bytes: float
    memory: MemoryUse
    hbm_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.total_bytes <= self.hbm_bytes


def compile_for_target(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str,
    options: Mapping[str, object] | None = None,
) -> list[ProgramReport]:
    """Captures a call, compiles every graph of it for a TPU topology, and runs the graphs in eager to go on.

    Args:
        function: a module or function, as torch.compile takes it.
        args, kwargs: one call's arguments; the call is made once, without gradients.
        target: "tpu:<topology>", such as "tpu:v5e:1x1".
        options: the backend's options.

    Raises:
        TargetError: no such topology, or libtpu is not installed.
        LoweringError, LinkError, CompileError: a graph cannot be compiled.
    """
    topology, hbm_bytes = _topology(target)
    parsed = Options.from_mapping(options)
    reports: list[ProgramReport] = []

    def make_part(pipeline: Pipeline) -> Callable[[PartGraphs, GraphModule], PartFunction]:
        return lambda graphs, module: CompileOnlyPart(graphs, module, pipeline, topology, hbm_bytes, reports)

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return GraphCompiler(process(), parsed, client=topology, make_part=make_part).compile(module, example_inputs)

    with torch.no_grad():
        torch.compile(function, backend=backend)(*args, **(kwargs or {}))
    return reports


class CompileOnlyPart:
    """A part that is compiled for a target elsewhere and computed here, in eager."""

    def __init__(
        self,
        graphs: PartGraphs,
        module: GraphModule,
        pipeline: Pipeline,
        topology: PjrtTopology,
        hbm_bytes: int,
        reports: list[ProgramReport],
    ) -> None:
        self._graphs = graphs
        self._module = module
        self._pipeline = pipeline
        self._topology = topology
        self._hbm_bytes = hbm_bytes
        self._reports = reports

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        name = f"program {len(self._reports)}"
        fold = self._graphs.specialize_fold()
        if fold is not None:
            self._reports.append(self._compile(f"{name} (weights)", fold))
        self._reports.append(self._compile(name, self._graphs.specialize(args).graph))
        results = self._module(*args, *self._graphs.constants)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    def _compile(self, name: str, graph: Graph) -> ProgramReport:
        started = time.perf_counter()
        lowered = self._pipeline.lower(graph)
        lowered_at = time.perf_counter()
        compiled = self._topology.compile_only(lowered.bytecode)
        finished_at = time.perf_counter()
        cost = compiled.cost()
        return ProgramReport(
            name=name,
            ops=sum(node.op == "call_function" for node in graph.nodes),
            lowering_s=lowered_at - started,
            compile_s=finished_at - lowered_at,
            flops=cost.get("flops", 0.0),
            accessed_bytes=cost.get("bytes accessed", 0.0),
            memory=compiled.memory_use(),
            hbm_bytes=self._hbm_bytes,
        )


def _topology(target: str) -> tuple[PjrtTopology, int]:
    platform, _, name = target.partition(":")
    generation = name.partition(":")[0]
    if platform != "tpu" or generation not in HBM_BYTES:
        raise TargetError(
            f"{target!r} is no TPU topology to compile for",
            f"write tpu:GENERATION:SHAPE, such as tpu:v5e:1x1; generations: {', '.join(HBM_BYTES)}",
        )
    return PjrtTopology(name), HBM_BYTES[generation]
