"""Programs of processes with several devices: compiled for one device, and for each way in which their arguments are sharded.

A program whose arguments were never sharded runs as on a single device: PJRT itself refuses a sharded argument, and from then
on each call looks at how its arguments are sharded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.fx import Graph

from dynaxla.diagnostics import ManyPrograms
from dynaxla.errors import ShardingError
from dynaxla.lowering.call_graph import CallGraph, GraphSharding
from dynaxla.mesh import Mesh, Sharding, replicate
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.pipeline import Pipeline
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.executable_info import MemoryUse
from dynaxla.runtime.joint_programs import JointExecutable
from dynaxla.runtime.loaded_executables import PjrtExecutable
from dynaxla.runtime.mesh_devices import MeshDevices, sharding_of
from dynaxla.types import TensorSpec

Run = Callable[[Sequence[Buffer]], list[Buffer]]
Shardings = tuple[Sharding | None, ...]
"""How the arguments of a call are sharded; None: on one device."""

EXPECTED = 8
"""Shardings of one program above which the user is warned."""
_TOLD = 4
_FEWER = "Shard the arguments of all calls alike"


@dataclass(frozen=True, slots=True)
class PartitionedProgram:
    """A program as it is compiled for some shardings of its arguments.

    Attributes:
        run: submits it.
        shardings: of the arguments.
    """

    run: Run
    shardings: Shardings


PartitionedPrograms = ProgramCache[tuple["ShardedProgram", tuple[int, ...]], PartitionedProgram]
"""The programs of a part, or of an op, for the shardings of their calls: by program, and by what tells shardings apart."""


class ShardingMiss(Exception):
    """A part's program is not there for how the arguments of a call are sharded. Nothing ran; the part's policy decides.

    Args:
        program: the program.
        key: tells the shardings apart.
        arguments: of the call.
    """

    def __init__(self, program: ShardedProgram, key: tuple[int, ...], arguments: Sequence[Buffer]) -> None:
        shardings = tuple(sharding_of(each) if place else None for each, place in zip(arguments, key, strict=True))
        self._program, self._key, self._shardings = program, key, shardings
        super().__init__(self.explain())

    def compile(self) -> PartitionedProgram:
        """The program, compiled for these shardings unless another thread just did."""
        return self._program.compile_for(self._key, self._shardings)

    def explain(self) -> str:
        """The shardings, and the nearest ones for which there is a program, for an error's text."""
        wanted, known = self._shardings, self._program.list_shardings()
        if not known:
            return f"{describe_shardings(wanted)}; there are: none"
        nearest = min(known, key=lambda other: sum(a != b for a, b in zip(wanted, other, strict=True)))
        changed = [
            f"{spec} is {_describe(a)}, there {_describe(b)}"
            for a, b, spec in zip(wanted, nearest, self._program.argument_specs, strict=True)
            if a != b
        ]
        more = [f"and {len(changed) - _TOLD} more"] if len(changed) > _TOLD else []
        return f"{describe_shardings(wanted)}; nearest is one of {len(known)}: {'; '.join(changed[:_TOLD] + more)}"


class ShardedProgram:
    """One program. It is an `Executable`; safe from several threads.

    Args:
        pipeline: compiles it.
        devices: those of its client.
        calls: gives the program's graph.
        fold: whether it computes what depends on weights alone.
        plain: the program for one device; None: it is compiled when a call has no argument on a mesh.
        kept: has the programs for each way in which arguments are sharded, with those of the same part; None: nobody
            decides about a call whose program is not there, which is compiled at once.

    Attributes:
        run: submits the program, as `Executable.run`.

    Raises:
        ShardingMiss: in `run`: it belongs to a part, and is not compiled for the shardings of the arguments.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        devices: MeshDevices,
        calls: Callable[[], CallGraph],
        fold: bool,
        plain: Executable | None = None,
        kept: PartitionedPrograms | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._devices = devices
        self._calls = calls
        self._fold = fold
        self._graph: CallGraph | None = None
        self._is_of_part = kept is not None
        self._kept = ProgramCache(pipeline.options.max_executables) if kept is None else kept
        self._is_partitioned = False
        self._noticed: set[str] = set()
        self._latest: Executable | None = plain
        self.run: Run = self._run_as_sharded
        if plain is not None:
            self._set_plain(plain)

    def hlo_text(self) -> str:
        return "" if self._latest is None else self._latest.hlo_text()

    def memory_use(self) -> MemoryUse:
        return MemoryUse(0, 0, 0, 0) if self._latest is None else self._latest.memory_use()

    def cost(self) -> dict[str, float]:
        return {} if self._latest is None else self._latest.cost()

    def serialize(self) -> bytes | None:
        return None if self._latest is None else self._latest.serialize()

    def _set_plain(self, plain: Executable) -> Run:
        """From now on calls run the program for one device without a look at their arguments."""
        assert isinstance(plain, PjrtExecutable)
        plain.on_refusal = self._run_refused
        self.run = plain.run
        return plain.run

    def _compile_plain(self) -> Executable:
        plain = self._compile(self._find_graph())
        if not self._is_partitioned:
            self._set_plain(plain)
        return plain

    def _run_refused(self, arguments: Sequence[Buffer]) -> list[Buffer] | None:
        """Serves a call that the program for one device refused; None if no argument is on a mesh."""
        if not any(self._devices.key_of(arguments)):
            return None
        self._is_partitioned, self.run = True, self._run_as_sharded
        return self._run_as_sharded(arguments)

    def _run_as_sharded(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        key = self._devices.key_of(arguments)
        place = self, key
        found = self._kept.get(place)
        if found is not None:
            self._kept.mark_used(place)
            return found.run(arguments)
        miss = ShardingMiss(self, key, arguments)
        if self._is_of_part:
            raise miss
        return miss.compile().run(arguments)

    @property
    def argument_specs(self) -> list[TensorSpec]:
        """The arguments' shapes and dtypes."""
        return list(self._find_graph().inputs.values())

    def list_shardings(self) -> list[Shardings]:
        """The shardings of arguments for which there is a program."""
        return [self._kept.get(place).shardings for place in self._places()]  # type: ignore[union-attr]

    def compile_for(self, key: tuple[int, ...], shardings: Shardings) -> PartitionedProgram:
        """The program for these shardings of its arguments, compiled in this thread unless another one just did.

        Args:
            key: what `MeshDevices.key_of` gives of such arguments.

        Raises:
            ShardingError: they are on two meshes.
            LinkError, CompileError: see `Pipeline.compile`.
        """
        place = self, key
        with self._kept.lock(place):
            found = self._kept.get(place)
            if found is None:
                mesh = _common_mesh(shardings)
                if mesh is not None:
                    self._is_partitioned, self.run = True, self._run_as_sharded
                    run = self._make_sharded(mesh, shardings)
                else:
                    run = self._compile_plain().run
                found = PartitionedProgram(run, shardings)
                evicted = self._kept.put(place, found, self._list_notices())
                self._pipeline.recorder.add(evictions=len(evicted))
        return found

    def _places(self) -> list[tuple[ShardedProgram, tuple[int, ...]]]:
        return [place for place in list(self._kept.keys()) if place[0] is self]

    def _list_notices(self) -> Iterator[ManyPrograms]:
        """The warnings about the number of programs that are due, each once."""
        most, count, every = self._pipeline.options.max_executables, len(self._places()), len(self._kept)
        what = self._pipeline.origin.what
        varies = "; ".join(map(describe_shardings, self.list_shardings()[-_TOLD:]))
        if count > EXPECTED and self._is_new("shardings"):
            yield ManyPrograms(count, "one for each sharding of its arguments", varies, _FEWER, what)
        if every > most and self._is_new("evicted"):
            reason = f"more than the {most} that max_executables keeps, so it will compile again and again"
            yield ManyPrograms(every, reason, varies, f"{_FEWER}, or keep more", what)

    def _is_new(self, notice: str) -> bool:
        is_new = notice not in self._noticed
        self._noticed.add(notice)
        return is_new

    def _make_sharded(self, mesh: Mesh, shardings: Shardings) -> Run:
        graph = self._find_graph()
        specs = list(graph.inputs.values())
        inputs = tuple(
            sharding or replicate(mesh, len(spec.shape)) for sharding, spec in zip(shardings, specs, strict=True)
        )
        lacking = {i: i in graph.donated for i, sharding in enumerate(shardings) if sharding is None}
        # A new value is where the old one is; what was not on the mesh yet takes what XLA chooses.
        graph = replace(graph, donated={a: r for a, r in graph.donated.items() if shardings[a] is not None})
        results: list[Sharding | None] = [None] * len(graph.results)
        for argument, result in graph.donated.items():
            results[result] = inputs[argument]
        executable, unknown = self._compile_sharded(graph, mesh, inputs, results)
        if unknown:
            for result in unknown:
                results[result] = replicate(mesh, len(graph.result_specs[result].shape))
            executable, unknown = self._compile_sharded(graph, mesh, inputs, results)
            assert not unknown
        told = f" ({describe_shardings(shardings)})" if self._is_of_part else f" on {mesh}"
        self._devices.programs[executable] = self._pipeline.origin.what + told, self._is_of_part
        return partial(self._run_replicating, executable, mesh, lacking) if lacking else executable.run

    def _compile_sharded(
        self, graph: CallGraph, mesh: Mesh, inputs: tuple[Sharding, ...], results: Sequence[Sharding | None]
    ) -> tuple[PjrtExecutable, list[int]]:
        """The program, and which of its results have shardings that no spec describes."""
        executable = self._compile(
            replace(graph, sharding=GraphSharding(mesh, inputs, tuple(results), self._devices.ranks_of(mesh)))
        )
        assert isinstance(executable, PjrtExecutable)
        return executable, self._devices.set_results(executable, graph.result_specs, mesh)

    def _run_replicating(
        self, executable: PjrtExecutable, mesh: Mesh, lacking: Mapping[int, bool], arguments: Sequence[Buffer]
    ) -> list[Buffer]:
        """Runs a program of which some arguments are not on the mesh yet.

        Args:
            lacking: their positions, each with whether the argument gets a new value, so that nobody needs the old one there.
        """
        given, replaced = list(arguments), dict[int, Buffer]()
        for place, is_overwritten in lacking.items():
            buffer = given[place]
            given[place] = made = self._devices.replicate(buffer, mesh)
            if not is_overwritten:
                replaced[id(buffer)] = made
        self._devices.on_replicated(replaced)
        return executable.run(given)

    def _find_graph(self) -> CallGraph:
        if self._graph is None:
            self._graph = self._calls()
        return self._graph

    def _compile(self, graph: CallGraph) -> Executable:
        self._latest = self._pipeline.compile_calls(graph, CompileTiming(), fold=self._fold)
        return self._latest


def compile_for_devices(
    pipeline: Pipeline,
    graph: Graph,
    spent: CompileTiming,
    *,
    fold: bool = False,
    kept: PartitionedPrograms | None = None,
) -> Executable:
    """As `Pipeline.compile`; where the client has several devices, a program that may be sharded.

    If a mesh was made, the program is lowered, and XLA compiles it when its first call says how it is sharded.

    Args:
        kept: see `ShardedProgram`.
    """
    devices = pipeline.client.mesh_devices
    if devices is None:
        return pipeline.compile(graph, spent, fold=fold)
    calls = pipeline.list_calls(graph)
    if calls.ranks:  # of process groups, whose tensors are on one device of each process
        return pipeline.compile_calls(calls, spent, fold=fold)
    plain = None
    if devices.in_use:
        pipeline.make_lowering().functions(calls)
    else:
        plain = pipeline.compile_calls(calls, spent, fold=fold)
    return ShardedProgram(pipeline, devices, lambda: calls, fold, plain, kept)


def lower_for_devices(pipeline: Pipeline, graph: Graph) -> Executable | partial[Executable]:
    """As `compile_for_devices`, of a process that is alone; XLA's part is left to the caller, as by `Pipeline.lower_first`,
    unless a mesh was made."""
    devices = pipeline.client.mesh_devices
    if devices is not None and devices.in_use:
        return compile_for_devices(pipeline, graph, CompileTiming())
    calls = pipeline.list_calls(graph)
    made = pipeline.lower_first(calls, CompileTiming())
    if devices is None:
        return made
    finish = partial(_finish_shardable, pipeline, devices, calls, made)
    return finish if isinstance(made, partial) else finish()


def _finish_shardable(
    pipeline: Pipeline, devices: MeshDevices, calls: CallGraph, made: Executable | partial[Executable]
) -> Executable:
    plain = made() if isinstance(made, partial) else made
    return ShardedProgram(pipeline, devices, lambda: calls, False, plain)


def make_shardable(
    pipeline: Pipeline,
    plain: Executable,
    find_graph: Callable[[], Graph],
    kept: PartitionedPrograms,
    *,
    fold: bool = False,
) -> Executable:
    """A part's program for one device as one that may be sharded, where the client has several.

    Args:
        find_graph: gives its graph, which is needed where an argument is sharded.
        kept: see `ShardedProgram`.
    """
    devices = pipeline.client.mesh_devices
    if devices is None or isinstance(plain, JointExecutable):
        return plain
    return ShardedProgram(pipeline, devices, lambda: pipeline.list_calls(find_graph()), fold, plain, kept)


def describe_shardings(shardings: Shardings) -> str:
    """The shardings of a call's arguments as a line, equal ones together."""
    meshes = list(dict.fromkeys(str(each.mesh) for each in shardings if each is not None))
    if not meshes:
        return "arguments on one device"
    counts = Counter(map(_describe, shardings)).items()
    return f"arguments on {' and '.join(meshes)}: {', '.join(f'{count} {what}' for what, count in sorted(counts))}"


def _describe(sharding: Sharding | None) -> str:
    if sharding is None:
        return "on one device"
    return "on every device" if sharding.is_replicated else str(sharding.spec)


def _common_mesh(shardings: Sequence[Sharding | None]) -> Mesh | None:
    """
    Raises:
        ShardingError: there are two.
    """
    meshes = list(dict.fromkeys(sharding.mesh for sharding in shardings if sharding is not None))
    if len(meshes) > 1:
        raise ShardingError(
            f"tensors on two meshes meet: {meshes[0]} and {meshes[1]}", "shard all tensors of a call over one mesh"
        )
    return meshes[0] if meshes else None
