"""Per graph: what torch.compile calls. Options, client, caches and recorder are built here and handed down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from dynaxla.capture.decompose import decomposition_table
from dynaxla.capture.rewrite import lift_constants, rewrite
from dynaxla.debug.dump import Dump
from dynaxla.dispatch import CompiledPart, PartFunction, PartGraphs
from dynaxla.errors import OptionError
from dynaxla.lowering.isolation import LoweringWorker
from dynaxla.lowering.jax_rules import all_rules
from dynaxla.lowering.link import Linker
from dynaxla.metrics.recorder import Metrics, Recorder
from dynaxla.options import Options
from dynaxla.partition.support import tensors_of
from dynaxla.parts import PartBuilder
from dynaxla.pipeline import Pipeline
from dynaxla.runtime import pjrt
from dynaxla.runtime.client import Client
from dynaxla.runtime.residency import WriteWatch
from dynaxla.stages import CapturedGraph
from dynaxla.versions import check_versions

Compiled = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class Process:
    """What the graphs of one process share."""

    recorder: Recorder = field(default_factory=Recorder)
    watch: WriteWatch = field(default_factory=WriteWatch)
    worker: LoweringWorker = field(default_factory=LoweringWorker)
    linker: Linker = field(default_factory=lambda: Linker(all_rules()))


@cache
def process() -> Process:
    """The process's own instance; versions are checked when it is made.

    Raises:
        VersionError: an installed library is outside the supported range.
    """
    check_versions()
    return Process()


def metrics() -> Metrics:
    """Counters since the process began."""
    return process().recorder.snapshot()


def dynaxla(module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """The backend: `torch.compile(model, backend="dynaxla", options={...})`.

    Args:
        module: the graph that Dynamo captured.
        example_inputs: its inputs, as fake tensors and symbolic sizes.
        options: see `dynaxla.options.Options`.

    Raises (at the first call of the compiled function):
        OptionError: an unknown option, a wrong type, or values that contradict each other.
    """
    try:
        parsed = Options.from_mapping(options)
    except OptionError as error:
        return _raises(error)  # raised by the call, so that Dynamo does not wrap it in an error of its own
    compiler = GraphCompiler(process(), parsed)
    backend = aot_autograd(
        fw_compiler=compiler.compile_forward,
        bw_compiler=compiler.compile_backward,
        inference_compiler=compiler.compile_forward,
        decompositions=dict(decomposition_table()),
    )
    return backend(module, example_inputs)


class GraphCompiler:
    """Compiles the graphs that AOTAutograd makes of one Dynamo graph."""

    def __init__(self, shared: Process, options: Options) -> None:
        self._process = shared
        self._options = options

    def compile_forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        return self._compile(module, _static_inputs())

    def compile_backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        return self._compile(module, frozenset())

    def _compile(self, module: GraphModule, static_inputs: frozenset[int]) -> Compiled:
        self._process.recorder.add(graphs=1)
        if self._options.executor == "eager":
            return _boxed(module.forward)
        module = torch.fx.GraphModule(module, module.graph)
        captured = rewrite(CapturedGraph(module, static_inputs, lift_constants(module)))
        device = _device(module)
        client = _client(self._options, device)
        dump = Dump(self._options.debug.dump, self._options.debug.stages)
        pipeline = Pipeline(
            client, self._process.worker, self._process.linker, self._process.recorder, self._options, dump
        )

        def make_part(graphs: PartGraphs, module: GraphModule) -> PartFunction:
            return CompiledPart(graphs, pipeline, self._process.watch)

        builder = PartBuilder(pipeline, device, make_part)
        function = builder.build(captured.module, sorted(captured.static_inputs), captured.constants, {})
        return _boxed_list(function)


def _raises(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error

    return fail


def _boxed(function: Callable[..., Any]) -> Compiled:
    def run(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        return function(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _boxed_list(function: PartFunction) -> Compiled:
    def run(args: list[Any]) -> list[Any]:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _static_inputs() -> frozenset[int]:
    """Inputs that are parameters or buffers and that the graph does not write to."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return frozenset()
    return frozenset(metadata.static_input_indices) - frozenset(metadata.mutated_inp_runtime_indices)


def _device(module: GraphModule) -> torch.device:
    """The device the graph computes on: an accelerator if any tensor is on one."""
    values = [v for n in module.graph.nodes for v in tensors_of(n)]
    away = [v.device for v in values if v.device.type != "cpu"]
    return away[0] if away else torch.device("cpu")


def _client(options: Options, device: torch.device) -> Client:
    if options.target is None:
        return pjrt.client_for(device)
    return pjrt.client_named(options.target)
