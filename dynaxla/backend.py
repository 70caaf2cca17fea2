"""Per graph: what torch.compile calls. Options and client are made here and handed down with what the process shares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from dynaxla.boundary import Boundary
from dynaxla.breaks import Capture, capture_of, last_capture, seconds_of_capture
from dynaxla.bucketing.joint import JOINT, JOINT_LANE_FRIENDLY, JOINT_UNKNOWN
from dynaxla.bucketing.marking import choose_policies
from dynaxla.bucketing.sizing import Policies
from dynaxla.capture.aliases import split_aliases
from dynaxla.capture.decompose import decomposition_table
from dynaxla.capture.in_place import write_in_place
from dynaxla.capture.margins import own_margin_losses
from dynaxla.capture.moved_inputs import keep_views_of_moved_inputs
from dynaxla.capture.quantized import quantized_decompositions
from dynaxla.capture.random import random_decompositions
from dynaxla.capture.resize import whole_resizes
from dynaxla.capture.rewrite import lift_constants, rewrite, weights_of
from dynaxla.capture.saved import partition_saving_padded
from dynaxla.capture.seeds import seeded, share_seeds, take_seeds
from dynaxla.debug.dump import Dump
from dynaxla.dispatch import CompiledPart
from dynaxla.errors import DynaxlaError, FrozenError
from dynaxla.freezing import Gate
from dynaxla.metrics.spent import Origin
from dynaxla.ops.table import core_table
from dynaxla.options import Options, check_mode
from dynaxla.partition.support import capture_refusal, graph_refusal, tensors_of
from dynaxla.parts import MakePart, PartBuilder
from dynaxla.pipeline import Pipeline
from dynaxla.policy import DEFAULT, LANE_FRIENDLY
from dynaxla.process import Process, process
from dynaxla.programs import copied, in_eager
from dynaxla.regions import take_regions
from dynaxla.runtime import pjrt
from dynaxla.runtime.client import Client
from dynaxla.stages import SAVED, CapturedGraph
from dynaxla.torch_api import symbols
from dynaxla.torch_api.aot import Inputs, aot_autograd, boxed, forward_inputs
from dynaxla.torch_api.dynamo import every_size_varies
from dynaxla.torch_api.overloads import OpOverload

logger = logging.getLogger("dynaxla")

Compiled = Callable[[list[Any]], list[Any]]


def dynaxla(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """The backend: `torch.compile(model, backend="dynaxla", options={...})`.

    Args:
        module: the graph that Dynamo captured.
        example_inputs: its inputs, as fake tensors and symbolic sizes.
        options: see `dynaxla.options.Options`.
        mode: one of torch.compile's own names, without effect: there is one way to compile.

    Raises (when the compiled function is called):
        OptionError: an unknown option or mode, a wrong type, or values that contradict each other.
        VersionError: an installed library is outside the supported range.
        TargetError: the options name a device that is not here.
        UnsupportedError: something cannot be compiled and options say fallback="error".
    """
    try:
        check_mode(mode)
        parsed = Options.from_mapping(options)
        return GraphCompiler(process(), parsed, gate=process().gates.capturing()).compile(module, example_inputs)
    except DynaxlaError as error:
        return _raises(error)  # raised by the call, so that Dynamo does not wrap it in an error of its own


class GraphCompiler:
    """Compiles the graphs that AOTAutograd makes of one Dynamo graph.

    Args:
        shared: what the process's graphs share.
        options: the user's.
        gate: says what a call does whose program is not compiled yet.
        client: overrides the client that the options and the tensors' devices choose.
        make_part: overrides what a compilable part becomes; by default a `CompiledPart`.
    """

    def __init__(
        self,
        shared: Process,
        options: Options,
        *,
        gate: Gate | None = None,
        client: Any = None,
        make_part: Callable[[Pipeline], MakePart] | None = None,
    ) -> None:
        self._process = shared
        self._options = options
        self._gate = gate or Gate()
        self._client = client
        self._make_part = make_part or self._compiled_part
        self._policies = Policies(DEFAULT, JOINT)
        self._boundary = Boundary(shared.recorder, options)
        self._origin = Origin("a graph")

    def compile(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Captures and compiles; gives the function that Dynamo calls."""
        if self._gate.on_miss in ("error", "eager", "next_bucket"):
            return self._refused_graph(module)
        captured = capture_of(module)
        self._origin = Origin(captured.function)
        try:
            refused = capture_refusal(module)
            if refused is not None:
                self._boundary.leave(refused, module)
            compiled = self._capture(module, example_inputs) if refused is None else module.forward
        except Exception as error:  # the border of a graph's capture, see boundary.py
            self._boundary.take(error, "a graph", module)
            compiled = module.forward
        self._origin.capture_s = seconds_of_capture()
        self._note(captured)  # not before: Dynamo may take a graph back while it is compiled
        return compiled

    def _note(self, captured: Capture) -> None:
        recorder = self._process.recorder
        recorder.note_capture(captured)
        last = last_capture(captured.function)
        if last is not None:
            recorder.note_last_capture(str(last))
            logger.warning("%s", last)

    def _capture(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        self._policies = choose_policies(
            module.graph,
            example_inputs,
            marks=self._process.marks,
            buckets=self._options.buckets,
            declared=self._gate.declared,
            default=_default_policies(self._options),
        )
        capture = aot_autograd(
            fw_compiler=self._compile_forward,
            bw_compiler=self._compile_backward,
            inference_compiler=self._compile_inference,
            decompositions=_decompositions(self._process.registered.current.bodies, self._options.rng),
            partition_fn=partition_saving_padded,
        )
        with whole_resizes(), own_margin_losses():
            return capture(module, example_inputs)

    def _refused_graph(self, module: GraphModule) -> Callable[..., Any]:
        """What runs for a graph that Dynamo captured for a frozen function."""
        forget = self._gate.refuse_graph()

        def run(*args: Any) -> Any:
            on_miss = self._current_gate().on_miss
            if on_miss in ("compile", "background"):
                forget()  # a function compiled alike met the graph, and may have it compiled at its next call
                return module.forward(*args)
            self._process.recorder.add(misses=1)
            if on_miss == "error":
                raise FrozenError("Dynamo captured a new graph")
            return module.forward(*args)

        return run

    def _compile_forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        inputs = forward_inputs()
        keep_views_of_moved_inputs(module.graph, inputs)
        return self._compile(module, _static_inputs(inputs, module))

    def _compile_inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        write_in_place(module, forward_inputs())
        return self._compile_forward(module, example_inputs)

    def _compile_backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        for node in module.graph.find_nodes(op="placeholder"):
            node.meta[SAVED] = True
        return self._compile(module, frozenset())

    def _compile(self, module: GraphModule, static_inputs: frozenset[int]) -> Compiled:
        self._process.recorder.add(graphs=1)
        share_seeds(module.graph)
        refused = graph_refusal(module)
        if refused is not None and self._options.executor != "eager":
            self._boundary.leave(refused, module)
        elif self._options.executor != "eager":
            try:
                return self._build(GraphModule(module, copied(module.graph)), static_inputs)
            except Exception as error:  # the border of a captured graph, see boundary.py
                self._boundary.take(error, "a captured graph", module)
        return boxed(in_eager(module))

    def _build(self, module: GraphModule, static_inputs: frozenset[int]) -> Compiled:
        """Rewrites a captured graph in place and cuts it into parts."""
        aliases = split_aliases(module)
        captured = CapturedGraph(module, static_inputs, lift_constants(module))
        device = _device(module)
        weights = weights_of(captured) if self._options.nested_regions == "loop" else set()
        known, numbers = self._process.registered.current, self._process.region_numbers
        table = take_regions(module, weights, known, device, numbers)
        seeds = take_seeds(module, len(captured.constants))
        captured = rewrite(captured, self._options.fold_parameters)
        pipeline = Pipeline(
            client=self._client or _client(self._options, device),
            worker=self._process.worker,
            linker=self._process.linker.using(table.bodies),
            choice=replace(self._process.choice, table=table),
            tracing=self._process.tracing,
            recorder=self._process.recorder,
            options=self._options,
            dump=Dump(self._options.debug.dump, self._options.debug.stages),
            origin=self._origin,
        )
        builder = PartBuilder(pipeline, device, self._make_part(pipeline))
        function = builder.build(captured.module, sorted(captured.static_inputs), captured.constants, {})
        function = seeded(function, seeds)
        return boxed(function if aliases is None else aliases.around(function))

    def _current_gate(self) -> Gate:
        return self._process.gates.calling() or self._gate

    def _compiled_part(self, pipeline: Pipeline) -> MakePart:
        watch, policies, gate = self._process.watch, self._policies, self._current_gate
        return lambda graphs: CompiledPart(graphs, pipeline, watch, policies, gate)


def _decompositions(rules: Mapping[OpOverload, Any], rng: str) -> dict[OpOverload, Callable[..., Any]]:
    """All but those of ops to which the user gave a body."""
    own = core_table().bodies
    available = {**decomposition_table(), **quantized_decompositions()}
    if rng == "compiled":
        available = {**available, **random_decompositions()}
    return {op: rewrite for op, rewrite in available.items() if rules.get(op) is own.get(op)}


def _default_policies(options: Options) -> Policies:
    if (options.target or "").startswith("tpu"):
        return Policies(LANE_FRIENDLY, JOINT_LANE_FRIENDLY)
    return Policies(DEFAULT, JOINT_UNKNOWN if every_size_varies() else JOINT)


def _raises(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error.with_traceback(None)  # else every call would add its own to the one error

    return fail


def _static_inputs(inputs: Inputs | None, module: GraphModule) -> frozenset[int]:
    """Inputs that are parameters or buffers and that the graph does not write to.

    To Dynamo a module's plain tensor is one too. Where it has other sizes in other modules, they are symbols: that is an
    input like any other.
    """
    if inputs is None:
        return frozenset()
    placeholders = module.graph.find_nodes(op="placeholder")
    varying = {i for i, node in enumerate(placeholders) if any(map(symbols.varies, tensors_of(node)))}
    return inputs.static - {write.input for write in inputs.writes} - varying


def _device(module: GraphModule) -> torch.device:
    """The device the graph computes on: an accelerator if any tensor is on one."""
    values = [v for n in module.graph.nodes for v in tensors_of(n)]
    away = [v.device for v in values if v.device.type not in ("cpu", "meta")]
    return away[0] if away else torch.device("cpu")


def _client(options: Options, device: torch.device) -> Client:
    if options.target is None:
        return pjrt.client_for(device)
    return pjrt.client_named(options.target)
