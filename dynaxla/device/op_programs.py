"""Once per call of its kind: from a captured call to an executable, by the passes and the pipeline of compiled graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.device.cpu_fallback import MOST_DIMS
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.op_call import OpInvocation
from dynaxla.device.trace_op import TensorWrite, TracedGraph, TraceInputs, Untraceable, trace_call
from dynaxla.diagnostics import FallbackReason, ReasonId
from dynaxla.errors import CompileError, DynaxlaError, ExecutionError, LinkError, LoweringError
from dynaxla.graph_builder import GraphBuilder
from dynaxla.observe.compile_timing import CapturedFunction, CompileTiming
from dynaxla.observe.dump import Dump
from dynaxla.observe.usage import CrossedBytes
from dynaxla.ops.table import OpTable
from dynaxla.options import Options
from dynaxla.partition.op_support import refusal
from dynaxla.passes.manager import CapturedGraph, PassContext, run_passes
from dynaxla.passes.pass_order import FOR_ONE_CALL
from dynaxla.pipeline import Pipeline
from dynaxla.programs.donation import donated_arguments
from dynaxla.programs.miss_policy import FunctionPolicy
from dynaxla.programs.sharded_program import compile_for_devices, lower_for_devices
from dynaxla.programs.specialize import specialize
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import download, upload_readonly
from dynaxla.runtime_state import RuntimeState
from dynaxla.targets.target import Target
from dynaxla.torch_api.fakes import drop_graph_sources
from dynaxla.torch_api.gc_guard import pause_collection
from dynaxla.torch_api.tracing import enable_dispatch
from dynaxla.types import OutputSource, StaticGraph, TensorSpec

logger = logging.getLogger("dynaxla")

T = TypeVar("T")
Precision = Literal["highest", "high", "default"]
PRECISIONS: Mapping[str, Precision] = {"highest": "highest", "high": "high", "medium": "default"}
COMPILERS = 2
"""Programs of single ops that XLA compiles at once, while Python goes on."""
CAPTURED_AS = torch.device("cpu")
"""Graphs are captured of tensors like those of the host, on which the op table was tried."""


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """A tensor that a program makes.

    Attributes:
        source: a result of the executable, or an input that is handed through.
        array: what lies in its buffer.
        tensor: what it is to torch.
        strides: None: row-major.
    """

    source: OutputSource
    array: TensorSpec
    tensor: TensorSpec
    strides: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class OpProgramSignature:
    """What the program of a call of a kind takes and gives.

    Attributes:
        inputs: of the capture.
        results: as `TracedGraph.results`, with numbers of `outputs`.
        writes: of the last outputs.
        takes: of all inputs of the capture those that the executable reads, by position; further ones are seeds and constants.
        seeds: how many seeds it takes, behind the inputs.
        constants: tensors that it takes, behind the seeds.
        outputs: of the results, then of the writes.
        donated: the arguments of the executable whose memory it takes for what is written there.
    """

    inputs: TraceInputs
    results: tuple[Any, ...]
    writes: tuple[TensorWrite, ...]
    takes: tuple[int, ...]
    seeds: int
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[ProgramOutput, ...]
    donated: tuple[int, ...]

    @property
    def result_count(self) -> int:
        """How many results the executable gives."""
        return 1 + max((made.source.result for made in self.outputs if made.source.result is not None), default=-1)


@dataclass(slots=True, eq=False)
class OpProgram:
    """A call of a kind, compiled or being compiled.

    Attributes:
        executable: None where every output is an input, and as long as XLA compiles it.
        compiling: None as soon as it is compiled.
    """

    executable: Executable | None
    outline: OpProgramSignature
    compiling: Compiling | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `settle` would not wait."""
        return self.compiling is None or self.compiling.executable.done()

    def settle(self) -> Executable | None:
        """Waits for the compiler; None if XLA refuses the program, and the call is the host's."""
        compiling = self.compiling
        if compiling is not None:
            if compiling.executable.exception() is not None:
                return None
            self.executable = compiling.executable.result()
            self.compiling = None
        return self.executable

    def run(self, buffers: list[Buffer], made_by: str) -> list[Buffer]:
        """The results of a call that `made_by` describes; none where there is no executable.

        Raises:
            ExecutionError: the run failed at once.
        """
        if self.executable is None:
            return []
        try:
            return self.executable.run(buffers)
        except ExecutionError as error:
            raise ExecutionError(f"{made_by} failed on the device: {error.explanation}", error.hint) from error


@dataclass(frozen=True, slots=True, eq=False)
class TracedOp:
    """A call of a kind, ready to be compiled.

    Attributes:
        graph: of what the program takes and gives, row-major arrays.
        table: what is known of its ops.
        precision: of its products, where it was called: an option's value.
    """

    known: FunctionalForm
    outline: OpProgramSignature
    graph: Graph
    table: OpTable
    precision: Precision

    @property
    def computes(self) -> bool:
        """Whether any output is no input."""
        return any(made.source.result is not None for made in self.outline.outputs)


class Compiling(NamedTuple):
    """A program that XLA compiles in another thread.

    Attributes:
        traced: the call, for the host, if XLA refuses it.
    """

    executable: Future[Executable]
    traced: TracedOp


@dataclass(frozen=True, slots=True)
class CpuFallback:
    """A call of a kind that the device does not compute.

    Attributes:
        reason: why.
    """

    reason: FallbackReason


@dataclass(frozen=True, slots=True)
class OpProgramBuilder:
    """Builds programs of calls."""

    shared: RuntimeState
    options: Options
    target: Target
    client: PjrtClient
    _compilers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(COMPILERS, thread_name_prefix="dynaxla-ops")
    )

    def build(self, call: OpInvocation) -> OpProgram | CpuFallback:
        """The program of a call, or why it has none.

        Everything that stops a capture or a compile, a fault of torch's or of this package's included, leaves the call to the
        host: eager PyTorch gives the numbers as well, or raises the user's error.
        """
        return self._or_on_host(call.known, lambda: self._built(call))

    def trace(self, call: OpInvocation) -> TracedOp | CpuFallback:
        """The graph of a call's program, or why it has none, as `build`."""
        return self._or_on_host(call.known, lambda: self._traced(call))

    def compile(self, graph: Graph, traced: TracedOp, what: str) -> Executable:
        """The executable of a graph of row-major arrays.

        Args:
            traced: one of the calls that the graph makes.

        Raises:
            LoweringError, LinkError, CompileError: it has none.
        """
        return compile_for_devices(self._pipeline(traced, what), graph, CompileTiming())

    def _or_on_host(self, known: FunctionalForm, make: Callable[[], T]) -> T | CpuFallback:
        try:
            with enable_dispatch(), pause_collection():
                return make()
        except Untraceable as error:
            return CpuFallback(_reason(known, ReasonId.UNSUPPORTED_CALL, str(error)))
        except (LoweringError, LinkError, CompileError) as error:
            return CpuFallback(_reason(known, ReasonId.COMPILE_FAILED, _explain(error)))
        except Exception as error:  # the border of a call, see partition/error_boundary.py
            return CpuFallback(_reason(known, ReasonId.NO_LOWERING, _explain(error)))

    def run_on_host(self, traced: TracedOp, given: Sequence[Buffer]) -> list[Buffer]:
        """What eager PyTorch gives of what a call's program takes, counted."""
        host = [download(self.client, buffer) for buffer in given]
        with torch.no_grad():
            results = GraphModule({}, traced.graph)(*host)
        crossed = CrossedBytes(*(sum(tensor.nbytes for tensor in each) for each in (host, results)))
        self.shared.recorder.count_on_host(traced.known.name, crossed)
        return [upload_readonly(self.client, result.contiguous()) for result in results]

    def _built(self, call: OpInvocation) -> OpProgram | CpuFallback:
        traced = self._traced(call)
        if isinstance(traced, CpuFallback):
            return traced
        if not traced.computes:
            return OpProgram(None, traced.outline)
        what = str(traced.outline.results)
        if self.client.peers is not None:  # processes compile in the same order
            return OpProgram(self.compile(traced.graph, traced, what), traced.outline)
        made = lower_for_devices(self._pipeline(traced, what), traced.graph)
        if not isinstance(made, partial):
            return OpProgram(made, traced.outline)
        try:
            compiling = self._compilers.submit(self._compile_noted, made, traced.known)
        except RuntimeError:  # Python ends, and starts no thread any more
            return OpProgram(made(), traced.outline)
        self.shared.recorder.wait_before_reading(compiling)
        return OpProgram(None, traced.outline, Compiling(compiling, traced))

    def _compile_noted(self, make: Callable[[], Executable], known: FunctionalForm) -> Executable:
        try:
            return make()
        except Exception as error:  # the border of a call, see partition/error_boundary.py
            reason = _reason(known, ReasonId.COMPILE_FAILED, _explain(error))
            self.shared.recorder.note(fallbacks=str(reason))
            logger.warning("runs on the host: %s", reason)
            raise

    def _traced(self, call: OpInvocation) -> TracedOp | CpuFallback:
        if any(tensor.dim() > MOST_DIMS for tensor in call.tensors):
            return CpuFallback(_reason(call.known, ReasonId.UNSUPPORTED_CALL, f"it has over {MOST_DIMS} dims"))
        with self.shared.tracing, drop_graph_sources():
            captured = trace_call(call)
            graph = self._passed(captured.module)
            refused = self._refused(graph)
            return CpuFallback(refused) if refused is not None else self._specialized(call.known, captured, graph)

    def _pipeline(self, traced: TracedOp, what: str) -> Pipeline:
        builder = self._graph_builder(what, replace(self.options, matmul_precision=traced.precision))
        return builder.pipeline(traced.table, self._setting(), self._dump())

    def _setting(self) -> PassContext:
        return PassContext(self.target, CAPTURED_AS, self.options, self.shared.region_numbers)

    def _passed(self, module: GraphModule) -> CapturedGraph:
        captured = CapturedGraph("inference", module, self.shared.registered.current)
        return run_passes(FOR_ONE_CALL, captured, self._setting(), Dump(None, ()))

    def _refused(self, graph: CapturedGraph) -> FallbackReason | None:
        calls = (node for node in graph.module.graph.nodes if node.op == "call_function")
        table = graph.table.records
        reasons = (graph.refused.get(node.name) or refusal(node, table, CAPTURED_AS) for node in calls)
        return next((reason for reason in reasons if reason is not None), None)

    def _specialized(self, op: FunctionalForm, captured: TracedGraph, graph: CapturedGraph) -> TracedOp:
        module = graph.module
        placeholders = module.graph.find_nodes(op="placeholder")
        further = len(graph.seeds) + len(graph.constants)
        given = placeholders[: len(placeholders) - further]
        takes = tuple(place for place, node in enumerate(given) if node.users)
        for node in given:
            if not node.users:
                module.graph.erase_node(node)
        static = specialize(module.graph, None)
        outputs = _outputs(module, static)
        donated = tuple(argument for argument, _ in donated_arguments(static, _written(captured, takes, outputs)))
        known = captured.inputs, captured.results, captured.writes  # and not the graph, which is the larger part of it
        outline = OpProgramSignature(*known, takes, len(graph.seeds), graph.constants, outputs, donated)
        return TracedOp(op, outline, static.graph, graph.table, PRECISIONS[torch.get_float32_matmul_precision()])

    def _dump(self) -> Dump:
        return Dump(self.options.debug.dump, self.options.debug.stages)

    def _graph_builder(self, what: str, options: Options) -> GraphBuilder:
        policies = self.target.policies(False)
        return GraphBuilder(
            self.shared, options, policies, FunctionPolicy(), CapturedFunction(what), self.target, self.client
        )


def _written(captured: TracedGraph, takes: tuple[int, ...], outputs: tuple[ProgramOutput, ...]) -> dict[int, int]:
    """For the arguments that are memories which are written to, the output that is the new array."""
    writes = enumerate(captured.writes, start=len(outputs) - len(captured.writes))
    return {takes.index(w.memory): i for i, w in writes if not w.resized and w.memory in takes}


def _outputs(module: GraphModule, static: StaticGraph) -> tuple[ProgramOutput, ...]:
    returned: Any = module.graph.output_node().args[0]
    nodes = returned if isinstance(returned, (tuple, list)) else (returned,)
    return tuple(_made(node, source) for node, source in zip(nodes, static.outputs, strict=True))


def _made(node: Node, source: OutputSource) -> ProgramOutput:
    value = node.meta["val"]
    tensor = TensorSpec.from_tensor(value)
    order = source.order
    if order is None:
        is_strided = value.is_contiguous() and value.stride() != tensor.strides  # in dims of one element
        return ProgramOutput(source, tensor, tensor, tuple(value.stride()) if is_strided else None)
    torch_layout = sorted(range(len(order)), key=order.__getitem__)
    array = replace(tensor, shape=tuple(tensor.shape[dim] for dim in torch_layout))
    return ProgramOutput(source, array, tensor, tuple(value.stride()))


def _explain(error: BaseException) -> str:
    if isinstance(error, DynaxlaError):
        return f"{error.id} {error.explanation}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _reason(known: FunctionalForm, id: ReasonId, detail: str) -> FallbackReason:
    return FallbackReason(id=id, op=str(known.op), detail=detail[:500], hint="the op runs on the host")
