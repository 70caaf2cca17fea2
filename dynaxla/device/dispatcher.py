"""Every call of an op on device tensors: its program from the table, or made; run, and what it writes bound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from dynaxla.device.argument_checks import ValueChecks, overlaps_operand
from dynaxla.device.call_queue import CallQueue
from dynaxla.device.cpu_fallback import CpuFallbackRunner
from dynaxla.device.dynamic_op_calls import DynamicCall, DynamicOpRunner
from dynaxla.device.dynamic_op_graphs import DynamicOpGraphs, ProgramConditions
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.lazy_buffer import LazyBuffer
from dynaxla.device.lazy_mode import LazyMode
from dynaxla.device.op_call import DevicesDiffer, Lyings, OpInvocation, find_lazy_targets
from dynaxla.device.op_programs import (
    CpuFallback,
    OpProgram,
    OpProgramBuilder,
    OpProgramSignature,
    ProgramOutput,
    TracedOp,
)
from dynaxla.device.op_results import (
    bind_writes,
    collect_returns,
    resize_output,
    run_on_plain,
    share_results,
    wrap_output,
)
from dynaxla.device.padded_buffers import make_copies
from dynaxla.device.scalar_arguments import CHECKED, ScalarBuffers, eager_error_reason
from dynaxla.device.shape_generic_key import NotShapeGeneric, OpRecompileWarnings, split_sizes
from dynaxla.device.storage import DeviceStorage, DeviceStorages, find_sharding
from dynaxla.diagnostics import FallbackReason, ReasonId
from dynaxla.errors import DynaxlaError, ExecutionError
from dynaxla.isolation.interrupts import defer_interrupts
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.mesh_devices import MeshDevices
from dynaxla.runtime.transfers import upload
from dynaxla.torch_api.frames import user_line
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves
from dynaxla.torch_api.tracing import enable_dispatch
from dynaxla.types import DEVICE_TYPE

logger = logging.getLogger("dynaxla")

MOST_PROGRAMS = 4096
"""Programs of single ops that are kept. A small one takes some 0.1 MB of the host's memory; what is dropped is read back from
the disk's cache, or compiled again."""


class OpDispatcher:
    """Runs calls of ops, one by one or, in the fused mode, collected. Safe from several threads.

    It binds arguments and results itself, as writes, windows and seeds of a single op are no part's. By a part's binder an add
    takes 1.5 times as long between reading the call and its result (155 us and 103 us on the CPU, in one busy process).

    Args:
        seed: gives the seed of a call that draws, of the generator that it names.
    """

    def __init__(
        self,
        builder: OpProgramBuilder,
        memories: DeviceStorages,
        recorder: Recorder,
        host: CpuFallbackRunner,
        seed: Any,
    ) -> None:
        self._builder = builder
        self._client = builder.client
        self._memories = memories
        self._recorder = recorder
        self._host = host
        self._seed = seed
        self.checks = ValueChecks(builder.client)
        self.vectors = ScalarBuffers(builder.client)
        self.corners = make_copies(builder.client)
        self.layouts: Lyings = {}
        self.fused = LazyMode(builder, recorder)
        self.queue = CallQueue(builder, self.corners.copy)
        self._programs: ProgramCache[Hashable, Any] = ProgramCache(MOST_PROGRAMS, recorder)
        self._traces: ProgramCache[Hashable, Any] = ProgramCache(MOST_PROGRAMS, recorder)
        self._varying = DynamicOpGraphs(builder.shared)
        self._bucketed = DynamicOpRunner(memories, self.corners, seed)
        self._sizes = OpRecompileWarnings()
        self._warned: set[str] = set()

    def run(self, known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the op gives.

        Raises:
            DevicesDiffer: tensors of two devices meet.
            ExecutionError: the run failed at once.
            whatever eager PyTorch raises for the arguments.
        """
        self._memories.check_process(self._client.platform)
        if known.may_write_to_lazy and (lazy := find_lazy_targets(known, args, kwargs)):
            return run_on_plain(self.run, known, args, kwargs, lazy)
        call = OpInvocation(known, self.layouts)
        call.read(args, kwargs)
        refused = self._refused(call, args, kwargs)
        if refused is not None:
            return self.run_on_host(known, args, kwargs, refused)
        terms = ProgramConditions(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )
        key = (known.op, call.parts, call.named, terms)
        program: OpProgram | TracedOp | CpuFallback | DynamicCall | None = self._programs.get(key)
        if self.fused.is_on and not isinstance(program, CpuFallback):
            program = self._traces.get(key) or self._make(self._traces, key, call, terms, self._builder.trace)
            self._traces.mark_used(key)
        elif program is None:
            program = self._make_program(key, call, terms)
        else:
            self._programs.mark_used(key)
        made_by = call.known.name + user_line()
        if isinstance(program, DynamicCall):
            made = self._run_served(program, call, terms, made_by)
            if made is not None:
                return collect_returns(
                    known, [wrap_output(place, made) for place in program.graph.captured.results], args, kwargs
                )
            program = self._make(self._programs, key, call, terms, self._builder.build)
            assert not isinstance(program, DynamicCall)
        if isinstance(program, CpuFallback):
            return self.run_on_host(known, args, kwargs, program.reason)
        if not program.outline.donated:
            return self._run_and_bind(program, call, made_by, args, kwargs)
        with defer_interrupts():  # the run takes the memory of tensors, which have to get their new values
            return self._run_and_bind(program, call, made_by, args, kwargs)

    def _run_and_bind(
        self,
        program: OpProgram | TracedOp,
        call: OpInvocation,
        made_by: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs a call's program, now or later, and binds what it writes."""
        if isinstance(program, TracedOp):
            given = self._given(program.outline, call, is_pending=True)
            results = self.fused.collect(program, given, call, made_by) if program.computes else []
        elif (self.queue.calls or program.compiling is not None) and self.queue.must_wait(program):
            given = self._given(program.outline, call, is_pending=True)
            shared = [
                argument for argument in program.outline.donated if self._is_shared(program.outline, argument, call)
            ]
            results = self.queue.add(program, given, shared)
        else:
            given = self._given(program.outline, call, is_pending=False)
            results = program.run(given, made_by)
        return self._bound(program.outline, given, results, call, made_by, args, kwargs)

    def run_pending(self) -> None:
        """Runs what was collected and what waits. What fails is raised where results are read."""
        self.fused.force()
        self.queue.finish()

    def force(self) -> None:
        """Runs what is pending, and raises the errors of values that the device found."""
        self.run_pending()
        self.checks.raise_failed()

    def _refused(self, call: OpInvocation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FallbackReason | None:
        """Why a call is left to eager PyTorch because of its numbers, values or memory: eager raises, or gives others."""
        known = call.known
        if call.numbers and known.function in CHECKED:
            reason = eager_error_reason(known.function, call.tensors, args, kwargs, call.numbers)
            if reason is not None:
                return reason
        if known.written and len(call.tensors) > len(call.memories) and overlaps_operand(known, args, kwargs):
            return FallbackReason(
                ReasonId.UNSUPPORTED_CALL, known.name, detail="it writes to memory of another operand"
            )
        if self.checks.is_refused(known, args, kwargs):
            return FallbackReason(ReasonId.UNSUPPORTED_CALL, known.name, detail="values are out of range")
        return None

    def run_on_host(
        self, known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any], reason: FallbackReason
    ) -> Any:
        """What eager PyTorch gives on the host, counted and, the first time, logged."""
        self.checks.raise_failed()
        results, crossed = self._host.run(known, args, kwargs)
        name = known.name
        self._recorder.count_on_host(name, crossed)
        if name not in self._warned:
            self._warned.add(name)
            self._recorder.note(fallbacks=str(reason))
            logger.warning("runs on the host: %s", reason)
        return results

    def run_sparse(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """What eager PyTorch gives on the host of an op of sparse tensors.

        Raises:
            DevicesDiffer: a tensor of the host that has dims is among them.
        """
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != DEVICE_TYPE and leaf.dim():
                raise DevicesDiffer(leaf.device)
        known = FunctionalForm.of(op)
        reason = FallbackReason(ReasonId.UNSUPPORTED_TENSOR, known.name, detail="it has sparse tensors")
        return self.run_on_host(known, args, kwargs, reason)

    def _make_program(
        self, key: Hashable, call: OpInvocation, terms: ProgramConditions
    ) -> OpProgram | CpuFallback | DynamicCall:
        with enable_dispatch():
            graph = self._varying.find(call, terms)
        if graph is None:
            return self._make(self._programs, key, call, terms, self._builder.build)  # type: ignore[no-any-return]
        served = DynamicCall(graph, split_sizes(call).values)
        self._programs.put(key, served)
        return served

    def _run_served(
        self, served: DynamicCall, call: OpInvocation, terms: ProgramConditions, made_by: str
    ) -> list[torch.Tensor] | None:
        """What a graph of buckets gives for a call; None if the call is to have a program of its own."""
        if not served.is_worth(call):
            return None
        try:
            return self._bucketed.run(served, call, made_by)
        except ExecutionError as error:
            raise ExecutionError(f"{made_by} failed on the device: {error.explanation}", error.hint) from error
        except (DynaxlaError, NotShapeGeneric) as error:
            self._varying.refuse(call, terms, error)
            return None

    def _make(
        self,
        programs: ProgramCache[Hashable, Any],
        key: Hashable,
        call: OpInvocation,
        terms: ProgramConditions,
        build: Callable[[OpInvocation], Any],
    ) -> Any:
        """Builds what a call runs, and keeps it.

        Two threads may build the same: with a lock for each key, a thread that holds the lock of tracing and reads a tensor
        would wait for the thread that compiles, and that one for the lock of tracing.
        """
        made = build(call)
        is_on_host = isinstance(made, CpuFallback)
        notices = () if is_on_host else self._sizes.notices(call, self._varying.refusal(call, terms))
        programs.put(key, made, notices)
        return made

    def _bound(
        self,
        program: OpProgramSignature,
        given: Sequence[Any],
        results: Sequence[Any],
        call: OpInvocation,
        made_by: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """What the op gives, of its results, which may be pending; what it writes is bound."""
        outputs = [self._memory(made, given, results, program, call, made_by) for made in program.outputs]
        if len(outputs) > 1:
            share_results(program, outputs)
        first = len(outputs) - len(program.writes)
        for write, memory, made in zip(program.writes, outputs[first:], program.outputs[first:], strict=True):
            if write.resized:
                resize_output(call.tensors[write.tensor], self._tensor(made, memory))
            else:
                bind_writes(call.memories[write.memory], memory)
        tensors = [self._tensor(made, memory) for made, memory in zip(program.outputs[:first], outputs, strict=False)]
        plain = [wrap_output(place, tensors) for place in program.results]
        return collect_returns(call.known, plain, args, kwargs)

    def _given(self, program: OpProgramSignature, call: OpInvocation, *, is_pending: bool) -> list[Any]:
        """What a program takes; of memories what they hold, if it may be pending."""
        if program.donated and not is_pending:
            self.fused.force()  # collected ops hold buffers that would be taken from them
        inputs = program.inputs
        arrays, buffers = len(inputs.arrays), []
        first = arrays + (1 if inputs.starts else 0)
        for place in program.takes:
            if place < arrays:
                memory = call.memories[place]
                is_later = is_pending and not memory.is_empty
                buffers.append(memory.held if is_later else self.buffer_of(memory))
            elif place < first:
                buffers.append(self.vectors.buffer(torch.int64, call.starts))
            elif place < first + len(inputs.numbers):
                dtype, which = inputs.numbers[place - first]
                buffers.append(self.vectors.buffer(dtype, [call.numbers[i] for i in which]))
            else:
                buffers.append(upload(self._client, call.hosts[place - first - len(inputs.numbers)]))
        if program.seeds:
            seed = self._seed(call.generator)
            buffers.extend([upload(self._client, seed)] * program.seeds)
        buffers.extend(upload(self._client, constant) for constant in program.constants)
        for argument in () if is_pending else program.donated:
            if self._is_shared(program, argument, call):
                buffers[argument] = self.corners.copy(buffers[argument])
        return buffers

    def _is_shared(self, program: OpProgramSignature, argument: int, call: OpInvocation) -> bool:
        """Whether an argument that a program takes the memory of is in another memory, too."""
        return call.memories[program.takes[argument]].is_shared

    def buffer_of(self, memory: DeviceStorage) -> Buffer:
        """The buffer of a memory; zeros where nothing was written yet."""
        buffer = memory.buffer
        if buffer is None:
            zeros = torch.zeros(memory.spec.shape, dtype=memory.spec.dtype, device="cpu")
            memory.rebind(upload(self._client, zeros))
            buffer = memory.buffer
        return buffer

    def _memory(
        self,
        made: ProgramOutput,
        buffers: Sequence[Buffer],
        results: Sequence[Buffer],
        program: OpProgramSignature,
        call: OpInvocation,
        by: str,
    ) -> DeviceStorage:
        source = made.source
        if source.result is not None:
            memory = DeviceStorage(made.array, results[source.result])
            memory.made_by = by
            return memory
        assert source.argument is not None
        memory = DeviceStorage(made.array, buffers[source.argument])
        place = program.takes[source.argument] if source.argument < len(program.takes) else -1
        if 0 <= place < len(call.memories):
            memory.have_as(call.memories[place])
            memory.made_by = call.memories[place].made_by
        else:
            memory.is_kept = True
        return memory

    def _tensor(self, made: ProgramOutput, memory: DeviceStorage) -> torch.Tensor:
        return self._memories.tensor(memory, made.tensor, made.strides)


class ShardedOpDispatcher(OpDispatcher):
    """Runs calls of ops in a process that has several devices."""

    def _bound(
        self,
        program: OpProgramSignature,
        given: Sequence[Any],
        results: Sequence[Any],
        call: OpInvocation,
        made_by: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        devices: MeshDevices = self._client.mesh_devices
        if devices.in_use:
            results = _place_results(devices, program, results, call)
        return super()._bound(program, given, results, call, made_by, args, kwargs)


def _place_results(
    devices: MeshDevices, program: OpProgramSignature, results: Sequence[Any], call: OpInvocation
) -> Sequence[Any]:
    """The results. Those that are written somewhere are sharded as what they replace, and those of `zeros_like` and its like,
    of which XLA knows nothing, as the operand of their shape."""
    placed = list(results)
    first = len(program.outputs) - len(program.writes)
    is_like = "_like" in call.known.name
    for number, made in enumerate(program.outputs):
        place = made.source.result
        if place is None:
            continue
        wanted = None
        if number >= first:
            write = program.writes[number - first]
            wanted = None if write.resized else find_sharding(call.memories[write.memory])
        elif is_like:
            alike = (memory for memory in call.memories if memory.spec.shape == made.array.shape)
            wanted = next((found for found in map(find_sharding, alike) if found is not None), None)
        if wanted is not None and type(placed[place]) is LazyBuffer:
            placed[place].sharding = wanted
        elif wanted is not None:
            placed[place] = devices.reshard(placed[place], wanted)
    return placed
