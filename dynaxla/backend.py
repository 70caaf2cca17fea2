"""Once per Dynamo graph: what torch.compile calls. Reads the options, chooses bucket policies, and has AOTAutograd capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from dynaxla.aot_cache.capture_key import find_tag
from dynaxla.aot_cache.kept_capture import KeptCapture
from dynaxla.bucketing.dynamic_dim_hints import mark_growing_dims
from dynaxla.bucketing.marked_dims import choose_policies
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.decompositions.choose_decompositions import GraphDecompositions, has_jagged_values, replace_composites
from dynaxla.errors import DynaxlaError, make_raising
from dynaxla.fx.edit import mark_gradients, mark_modules
from dynaxla.graph_builder import GraphBuilder, MakePartFor
from dynaxla.observe.compile_timing import CapturedFunction
from dynaxla.observe.graph_breaks import CaptureRecord, last_capture, many_captures, read_capture, read_capture_seconds
from dynaxla.options import Options, check_mode
from dynaxla.partition.error_boundary import Boundary
from dynaxla.partition.op_support import capture_refusal, make_moved_reason, refuse_inputs
from dynaxla.passes.manager import CapturedGraph, find_static_inputs
from dynaxla.passes.parameter_shardings import InputPlacement
from dynaxla.passes.saved_activations import partition_saving_padded, saved_outputs
from dynaxla.profiling import follow_torch_profiles
from dynaxla.programs.miss_policy import DEFAULTS, FunctionPolicy
from dynaxla.runtime_state import RuntimeState, process
from dynaxla.targets.cpu import CPU
from dynaxla.targets.registry import find_target
from dynaxla.targets.target import Target
from dynaxla.torch_api.aot import aot_autograd, drop_hidden_gradients, find_gradients, get_forward_inputs
from dynaxla.torch_api.aot_calls import call_directly
from dynaxla.torch_api.aot_outputs import detach_views_of_saved
from dynaxla.torch_api.capture_cache import is_packaging
from dynaxla.torch_api.dynamo import is_automatic_dynamic, is_fully_dynamic, make_recapture_error
from dynaxla.torch_api.graph_writes import drop_inactive_dropouts, unsqueeze_written_expansions
from dynaxla.torch_api.input_memory import InputMemory, drop_own_memory, find_input_memory
from dynaxla.torch_api.own_backwards import hide_own_views, tie_own_gradients
from dynaxla.torch_api.patches import apply_patches
from dynaxla.torch_api.random_numbers import take_full_precision
from dynaxla.torch_api.symbols import add_deferred_checks
from dynaxla.torch_api.undefined_gradients import take_undefined
from dynaxla.types import Saved

logger = logging.getLogger("dynaxla")


def compile_captured(
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
        mode: one of torch.compile's modes; it has no effect, as there is one way to compile.

    Raises (when the compiled function is called):
        OptionError: an unknown option or mode, a wrong type, or values that contradict each other.
        VersionError: an installed library is outside the supported range.
        TargetError: this machine lacks the device that the options name.
        UnsupportedError: something cannot be compiled and the options say fallback="error".
    """
    try:
        check_mode(mode)
        parsed = Options.from_mapping(options)
        if parsed.compile == "behind":
            process().compile_service.start()  # its process imports torch and JAX while the graph is captured
        function = process().function_policies.find_capturing()
        return GraphCompiler(process(), parsed, function=function).compile(module, example_inputs)
    except DynaxlaError as error:
        if is_packaging():  # nothing is called, and Dynamo wraps no error
            raise
        return make_raising(error)  # at the call, since Dynamo wraps an error that is raised here in one of its own


compile_captured.__name__ = compile_captured.__qualname__ = "dynaxla"  # the name that Dynamo prints
if TYPE_CHECKING:
    dynaxla = compile_captured


def __getattr__(name: str) -> Any:
    """Returns the backend, `dynaxla.backend.dynaxla`, after patching torch (torch_api/patches.py).

    torch.compile asks for it before Dynamo captures or loads anything; importing this module patches nothing.
    """
    if name != "dynaxla":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    apply_patches()
    follow_torch_profiles()
    return compile_captured


class GraphCompiler:
    """Compiles the graphs that AOTAutograd makes of one Dynamo graph.

    Args:
        shared: the state of the process, shared by all graphs.
        options: the user's.
        function: the miss policy of the compiled function.
        target: overrides the target that the options and the tensors' devices choose.
        client: overrides the target's client.
        make_part: makes the function of a compilable part; by default a `CompiledPart`.
        place_inputs: says which inputs of a graph are on a mesh; by default those whose tensors are.
    """

    def __init__(
        self,
        shared: RuntimeState,
        options: Options,
        *,
        function: FunctionPolicy | None = None,
        target: Target | None = None,
        client: Any = None,
        make_part: MakePartFor | None = None,
        place_inputs: Callable[[Sequence[Any]], InputPlacement] = InputPlacement.of,
    ) -> None:
        self._process = shared
        self._options = options
        self._function = function or FunctionPolicy()
        self._target = target or (None if options.target is None else find_target(options.target))
        self._client = client
        self._make_part = make_part
        self._place_inputs = place_inputs
        self._overridden = any(given is not None for given in (target, client, make_part))
        self._policies = _policies(self._target)
        self._boundary = Boundary(shared.recorder, options)
        self._origin = CapturedFunction("a graph")
        self._placement = InputPlacement()

    def compile(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Captures and compiles a graph. Returns the function that Dynamo calls."""
        if not self._function.on_miss(DEFAULTS[self._options.compile]).compiles_graphs:
            return self._refused_graph(module)
        if (
            self._options.bucketing != "off"
            and is_automatic_dynamic()
            and mark_growing_dims(module.graph, example_inputs)
        ):
            raise make_recapture_error()
        captured = read_capture(module)
        self._origin = CapturedFunction(captured.function)
        try:
            drop_own_memory(module)
            drop_inactive_dropouts(module)
            unsqueeze_written_expansions(module)
            tie_own_gradients(module)
            hide_own_views(module)
            refused = capture_refusal(module) or (None if self._overridden else refuse_inputs(example_inputs))
            if refused is not None:
                self._boundary.leave(refused, module)
            compiled = self._capture(module, example_inputs) if refused is None else module.forward
        except Exception as error:  # the border of a graph's capture, see partition/error_boundary.py
            if is_packaging():
                raise
            self._boundary.take(error, "a graph", module)
            compiled = module.forward
        self._origin.capture_s = read_capture_seconds()
        self._note(captured)  # not before: Dynamo may take a graph back while it is compiled
        return compiled

    def _note(self, captured: CaptureRecord) -> None:
        recorder = self._process.recorder
        recorder.note(captured=captured)
        recorder.add(capture_s=self._origin.capture_s)
        many, last = many_captures(captured.function), last_capture(captured.function)
        if last is not None:
            recorder.note(last_captures=str(last))
        for warning in filter(None, (many, last)):
            logger.warning("%s", warning)

    def _capture(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        example_inputs = take_full_precision(module, example_inputs)
        self._policies = choose_policies(
            module.graph,
            example_inputs,
            marks=self._process.marks,
            buckets=self._options.buckets,
            declared=self._function.declared,
            default=_policies(self._target),
        )
        builder, memory = self._builder(), find_input_memory(module)
        self._placement = self._place_inputs(example_inputs)
        tag = None if self._overridden else find_tag(module, builder, example_inputs, self._placement.listing, memory)

        def capture(
            make_compiler: Callable[[Callable[[GraphModule], CapturedGraph]], Any], inputs: Sequence[Any]
        ) -> Callable[..., Any]:
            with replace_composites(), take_undefined():
                function: Callable[..., Any] = aot_autograd(
                    **self._compilers(make_compiler),
                    decompositions=GraphDecompositions(
                        self._process.registered.current, self._options.rng, gives_strides=not has_jagged_values(module)
                    ),
                    partition_fn=partial(
                        partition_saving_padded,
                        placement=self._placement,
                        remakes_masks=self._target is not None and self._target.has_attention_kernels,
                        find_target=builder.find_target,
                    ),
                )(module, inputs)
            return function if is_packaging() else call_directly(function)

        if tag is None:
            captured = capture(lambda convert: lambda module, _: builder.build(convert(module)), example_inputs)
        else:
            captured = KeptCapture(capture, builder).find(tag, example_inputs)
        return captured if memory is None or is_packaging() else self._hold_memory(captured, module, memory)

    def _hold_memory(
        self, captured: Callable[..., Any], module: GraphModule, memory: InputMemory
    ) -> Callable[..., Any]:
        """Makes a function that runs the graph in eager where its inputs lie in memory otherwise than in the first call."""
        first: tuple[object, ...] | None = None
        is_captured = is_told = False

        def run(*args: Any) -> Any:
            nonlocal first, is_captured, is_told
            now = memory.read(args)
            if first is None:
                first, is_captured = now, memory.is_captured(now)
            if is_captured and now == first:
                return captured(*args)
            if not is_told or self._options.fallback == "error":
                is_told = True
                self._boundary.leave(make_moved_reason("a captured graph"), module)
            return module.forward(*args)

        return run

    def _refused_graph(self, module: GraphModule) -> Callable[..., Any]:
        """Returns the function of a graph that Dynamo captured for a frozen function: the miss policy serves each call."""
        forget = self._function.leave_uncompiled()

        def run(*args: Any) -> Any:
            policy = self._builder().miss_policy()
            if policy.compiles_graphs:
                forget()  # a function with the same options met the graph: its next call may compile it
            else:
                self._process.recorder.add(misses=1)
            return policy.serve_graph(module.forward, args)

        return run

    def _compilers(self, keep: Callable[..., Any]) -> dict[str, Any]:
        """Returns AOTAutograd's three compilers, each wrapped by `keep`."""
        kinds = {"fw_compiler": "forward", "bw_compiler": "backward", "inference_compiler": "inference"}
        return {compiler: keep(partial(self._captured, kind)) for compiler, kind in kinds.items()}

    def _captured(self, kind: Any, module: GraphModule) -> CapturedGraph:
        known = self._process.registered.current
        add_deferred_checks(module)
        mark_modules(module)
        if kind == "backward":
            drop_hidden_gradients(module.graph)
            mark_gradients(module.graph)
            saved, gradients = Saved(inputs=True, in_training=True), find_gradients(module.graph)
            return CapturedGraph(kind, module, known, saved=saved, gradients=gradients)
        if kind == "inference":
            self._placement.rewrite_inference(module.graph)
        inputs, saved = get_forward_inputs(), Saved(outputs=saved_outputs(module.graph), in_training=kind == "forward")
        detach_views_of_saved(module.graph, saved.outputs)
        return CapturedGraph(kind, module, known, inputs, find_static_inputs(inputs, module), saved)

    def _builder(self) -> GraphBuilder:
        return GraphBuilder(
            shared=self._process,
            options=self._options,
            policies=self._policies,
            function=self._function,
            origin=self._origin,
            target=self._target,
            client=self._client,
            make_part=self._make_part,
        )


def _policies(target: Target | None) -> SymbolPolicies:
    return (target or CPU).policies(is_fully_dynamic())
