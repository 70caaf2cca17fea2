"""Once per captured graph: makes the function that AOTAutograd calls. Passes, partition, parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dynaxla.backward_graphs import BackwardFunction, leave_out_undefined
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.cache.environment_key import versions
from dynaxla.cache.key import Key
from dynaxla.dispatch import PartFunction, make_part
from dynaxla.errors import DynaxlaError, PackageError
from dynaxla.fx.graph_utils import copy_graph, find_device, make_eager_function
from dynaxla.observe.compile_timing import CapturedFunction
from dynaxla.observe.dump import Dump
from dynaxla.ops.table import OpTable, core_table
from dynaxla.options import Options
from dynaxla.partition.error_boundary import Boundary
from dynaxla.partition.op_support import make_many_backwards_reason
from dynaxla.partition.output_views import Aliases
from dynaxla.partition.part_runner import MakePart, PartBuilder
from dynaxla.partition.partitioner import SplitGraph, WarmStart, WholePart
from dynaxla.passes.manager import CapturedGraph, GraphFunction, PassContext, run_passes, write_graph
from dynaxla.passes.pass_order import FOR_ALL, FOR_PARTS
from dynaxla.passes.seed_inputs import add_seed_arguments
from dynaxla.pipeline import Pipeline
from dynaxla.programs.miss_policy import DEFAULTS, CompileInCall, FunctionPolicy, MissPolicy
from dynaxla.programs.part_compiler import PartCompiler
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.runtime.packaged_programs import PackagedPrograms
from dynaxla.runtime_state import RuntimeState
from dynaxla.targets.registry import connect, mesh_devices
from dynaxla.targets.target import Target
from dynaxla.torch_api.aot import box_function
from dynaxla.torch_api.fakes import disable_modes
from dynaxla.torch_api.gc_guard import pause_collection
from dynaxla.torch_api.modules import graph_module
from dynaxla.torch_api.private_device import trace_as_captured
from dynaxla.torch_api.undefined_gradients import find_undefined
from dynaxla.verify.checked_graph import build_checked

MakePartFor = Callable[[Pipeline, SymbolPolicies], MakePart]


@dataclass(frozen=True, slots=True)
class GraphBuilder:
    """Builds the functions of the graphs that AOTAutograd makes of one Dynamo graph.

    Attributes:
        shared: the state of the process, shared by all graphs.
        options: the user's.
        policies: the bucket policies of the graphs' sizes.
        function: the miss policy of the compiled function.
        origin: Dynamo's graph.
        target: overrides the target that the tensors' devices choose.
        client: overrides the target's client.
        make_part: makes the function of a compilable part; by default a `CompiledPart`.
        bundle: the package that programs are read from or written to.
    """

    shared: RuntimeState
    options: Options
    policies: SymbolPolicies
    function: FunctionPolicy
    origin: CapturedFunction
    target: Target | None = None
    client: Any = None
    make_part: MakePartFor | None = None
    bundle: PackagedPrograms | None = None

    def build(self, graph: CapturedGraph) -> GraphFunction:
        """Makes the function of a graph, and changes the graph. Ops that cannot be compiled run in eager PyTorch."""
        return self.build_with_warm_start(graph, warm_starts=False)[0]

    def build_with_warm_start(
        self, graph: CapturedGraph, *, warm_starts: bool = True
    ) -> tuple[GraphFunction, WarmStart | None]:
        """As `build`. Also returns the graph's warm start; None unless the graph is a single part that a key determines."""
        return (self._build_backward if graph.kind == "backward" else self._build_counted)(graph, warm_starts)

    def _build_backward(self, graph: CapturedGraph, warm_starts: bool) -> tuple[GraphFunction, WarmStart | None]:
        """Makes the function of a backward. Its graph for the call at hand is built at once; where there is no call, the graph
        that takes all gradients."""
        undefined, function = find_undefined(), self._make_backward(lambda: graph, graph.gradients)
        if undefined and len(undefined) == len(graph.gradients):
            return box_function(function), None
        reduced = leave_out_undefined(graph, undefined)
        built, warm_start = self._build_counted(reduced.graph, warm_starts)
        function.add(reduced.inputs, built)
        if warm_start is not None:
            warm_start = replace(warm_start, backward=reduced.inputs)
        return box_function(function), warm_start

    def _make_backward(self, read: Callable[[], CapturedGraph], gradients: tuple[int, ...]) -> BackwardFunction:
        def build(graph: CapturedGraph) -> GraphFunction:
            with self.shared.tracing, disable_modes(), pause_collection(), trace_as_captured():
                return self._build_counted(graph, warm_starts=False)[0]

        def make_eager(graph: CapturedGraph) -> GraphFunction:
            Boundary(self.shared.recorder, self.options).leave(make_many_backwards_reason("a backward"), graph.module)
            return replace(self, options=replace(self.options, executor="eager"))._build(graph, warm_starts=False)[0]

        return BackwardFunction(read, gradients, build, make_eager)

    def _build_counted(self, graph: CapturedGraph, warm_starts: bool) -> tuple[GraphFunction, WarmStart | None]:
        self.shared.recorder.add(graphs=1)
        if self.options.verify and self.make_part is None:
            return self._build_checked(graph), None
        return self._build(graph, warm_starts)

    def build_op(self, graph: CapturedGraph) -> GraphFunction:
        """Makes the function of a single op's graph, which Dynamo did not capture.

        Its programs are compiled in its calls: a policy of a compiled function does not apply to what runs between its graphs.
        """
        return replace(self, make_part=partial(self._compiled_part, on_miss=CompileInCall))._build(graph, False)[0]

    def _build_checked(self, graph: CapturedGraph) -> GraphFunction:
        """Makes the function of a graph that compares some of its calls with eager."""
        trial = replace(self, options=replace(self.options, verify=0.0, compile="now"))
        context, recorder = self._context(find_device(graph.module)), self.shared.recorder
        return build_checked(
            graph, lambda g: self._build(g, False)[0], trial.build_op, self.origin.what, context, recorder
        )

    def _build(self, graph: CapturedGraph, warm_starts: bool) -> tuple[GraphFunction, WarmStart | None]:
        boundary = Boundary(self.shared.recorder, self.options)
        module, compiles = graph.module, self.options.executor != "eager"
        context = self._context(find_device(module))
        dump = Dump(self.options.debug.dump if compiles else None, self.options.debug.stages)
        write_graph(dump, "captured", graph)
        graph = run_passes(FOR_ALL, graph, context, dump)
        if compiles:
            try:
                whole = replace(graph, module=graph_module(module, copy_graph(module.graph)))
                return self._parts(whole, context, dump, warm_starts)
            except Exception as error:  # the border of a captured graph, see partition/error_boundary.py
                boundary.take(error, "a captured graph", module)
        return box_function(make_eager_function(module, graph.saved)), None

    def _parts(
        self, graph: CapturedGraph, context: PassContext, dump: Dump, warm_starts: bool
    ) -> tuple[GraphFunction, WarmStart | None]:
        """Runs the passes on a graph, in place, and partitions it."""
        graph = run_passes(FOR_PARTS, graph, context, dump)
        builder = self._part_builder(graph.table, context, dump)
        whole = _cut(graph, builder)
        warm_start = (
            self._make_warm_start(graph, whole, context) if warm_starts and isinstance(whole, WholePart) else None
        )
        function = graph.opaque.wrap(builder.build_partitioned(whole))
        return _wrap_parts(function, graph.seeds, graph.aliases), warm_start

    def _part_builder(self, table: OpTable, context: PassContext, dump: Dump) -> PartBuilder:
        pipeline = self.pipeline(table, context, dump)
        make_part = (self.make_part or self._compiled_part)(pipeline, self.policies)
        return PartBuilder(pipeline, context.device, make_part)

    def _make_warm_start(self, graph: CapturedGraph, whole: WholePart, context: PassContext) -> WarmStart | None:
        circumstances = self.circumstances(context.device)
        known = None if circumstances is None else whole.graphs.identify(self.policies, graph.table)
        if circumstances is None or known is None:
            return None
        return WarmStart(
            circumstances, context.device, whole.graphs.facts, known, whole.assertions, graph.seeds, graph.aliases
        )

    def circumstances(self, device: torch.device) -> str | None:
        """Returns a digest of all that determines a part beside its graph, policies and options.

        None if no key determines the part (users' bodies), if stages are dumped or calls verified, or if a mesh was made.

        Args:
            device: the device of the graph's tensors.
        """
        devices, watched = mesh_devices(), self.options.debug.dump is not None or self.options.verify
        if watched or self.shared.registered.current is not core_table() or (devices is not None and devices.in_use):
            return None
        target = self._context(device).target
        traits = (target.name, target.channels_last, target.copies_transposed)
        defaults = (str(torch.get_default_dtype()), str(torch.get_default_device()))
        return Key.of(target=traits, defaults=defaults, versions=versions()).digest

    def build_from_warm_start(self, warm_start: WarmStart, read: Callable[[], CapturedGraph]) -> GraphFunction:
        """Makes the function of a graph from the warm start that another process stored in the same circumstances.

        Args:
            read: reads the graph, for calls whose programs are not on disk.
        """
        inputs = warm_start.backward
        if inputs is None:
            return self._build_stored(warm_start, read)
        function = self._make_backward(read, inputs.gradients)
        stored = self._build_stored(warm_start, lambda: leave_out_undefined(read(), inputs.undefined).graph)
        function.add(inputs, stored)
        return box_function(function)

    def _build_stored(self, warm_start: WarmStart, read: Callable[[], CapturedGraph]) -> GraphFunction:
        self.shared.recorder.add(graphs=1)
        context, dump = self._context(warm_start.device), Dump(None, self.options.debug.stages)
        builder = self._part_builder(self.shared.registered.current, context, dump)

        read_parts = partial(self._cut_stored, read, builder, context, dump)
        later = PartGraphs.later(warm_start.facts, warm_start.known, self.options.fold_parameters, read_parts)
        return _wrap_parts(
            builder.build_partitioned(WholePart(later, warm_start.assertions)), warm_start.seeds, warm_start.aliases
        )

    def _cut_stored(
        self, read: Callable[[], CapturedGraph], builder: PartBuilder, context: PassContext, dump: Dump
    ) -> PartGraphs:
        """
        Raises:
            PackageError: the graph that was stored cannot be read, is not the one part that was described, or a pass fails.
        """
        try:
            with self.shared.tracing, disable_modes(), pause_collection():
                whole = _cut(run_passes((*FOR_ALL, *FOR_PARTS), read(), context, dump), builder)
        except DynaxlaError:
            raise
        except Exception as error:  # the border of a stored graph, see partition/error_boundary.py
            told = f"{type(error).__name__}: {error}"
            raise PackageError(f"the passes fail on a graph that was stored: {told}", "save it anew") from error
        if not isinstance(whole, WholePart):
            raise PackageError("a graph is not what was saved with it", "save it anew")
        return whole.graphs

    def find_target(self, device: torch.device) -> Target:
        """The target of tensors on a device."""
        return self._context(device).target

    def _context(self, device: torch.device) -> PassContext:
        return PassContext(self.target, device, self.options, self.shared.region_numbers, self.shared.recorder)

    def pipeline(self, table: OpTable, context: PassContext, dump: Dump) -> Pipeline:
        """Makes the pipeline that compiles the static graphs of parts.

        Args:
            table: the records of the graphs' ops.
        """
        shared, client = self.shared, self.client or connect(context.target, context.device)
        return Pipeline(
            client=client,
            worker=shared.worker,
            functions=shared.functions,
            executables=self._executables(),
            choice=replace(shared.choice, table=table, platform=client.platform),
            tracing=shared.tracing,
            recorder=shared.recorder,
            options=self.options,
            dump=dump,
            origin=self.origin,
        )

    def _executables(self) -> ExecutableCache:
        executables = self.shared.executables if self.options.cache else ExecutableCache(None)
        return replace(executables, bundle=self.bundle, recorder=self.shared.recorder)

    def _compiled_part(
        self, pipeline: Pipeline, policies: SymbolPolicies, on_miss: Callable[[], MissPolicy] | None = None
    ) -> MakePart:
        def compiled(graphs: PartGraphs) -> PartFunction:
            programs = PartPrograms(PartCompiler(graphs, pipeline), policies, adapts=on_miss is None)
            if on_miss is None:  # else it is an op, not a graph of the user's
                self.shared.parts[id(programs)] = programs
            return make_part(programs, self.shared.watch, on_miss or self.miss_policy, self.shared.compile_service)

        return compiled

    def miss_policy(self) -> MissPolicy:
        """Returns the miss policy of the function that is being called."""
        return (self.shared.function_policies.find_called() or self.function).on_miss(DEFAULTS[self.options.compile])


def _cut(graph: CapturedGraph, builder: PartBuilder) -> WholePart | SplitGraph:
    return builder.cut(graph.module, sorted(graph.static_inputs), graph.constants, graph.refused, graph.saved)


def _wrap_parts(function: PartFunction, seeds: Sequence[torch.device], aliases: Aliases | None) -> GraphFunction:
    """Makes the function of a graph from that of its parts: adds its seeds to the arguments, and its aliases to the results."""
    drawing = add_seed_arguments(function, seeds)
    return box_function(drawing if aliases is None else aliases.wrap(drawing))
