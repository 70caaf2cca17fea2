"""Programs of processes with several devices: compiled for one device, and for each way in which their arguments are sharded.

A program whose arguments were never sharded runs as on a single device: PJRT itself refuses a sharded argument, and from then
on each call looks at how its arguments are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch.fx import Graph

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

Run = Callable[[Sequence[Buffer]], list[Buffer]]


class ShardedProgram:
    """One program. It is an `Executable`; safe from several threads.

    Args:
        pipeline: compiles it.
        devices: those of its client.
        calls: gives the program's graph.
        fold: whether it computes what depends on weights alone.
        plain: the program for one device; None: it is compiled when a call has no argument on a mesh.

    Attributes:
        run: submits the program, as `Executable.run`; compiles it for the shardings of the arguments.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        devices: MeshDevices,
        calls: Callable[[], CallGraph],
        fold: bool,
        plain: Executable | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._devices = devices
        self._calls = calls
        self._fold = fold
        self._graph: CallGraph | None = None
        self._runs: ProgramCache[tuple[int, ...], Run] = ProgramCache(
            pipeline.options.max_executables, pipeline.recorder
        )
        self._latest: Executable | None = plain
        self.run: Run = self._run_as_sharded
        if plain is not None:
            self._set_plain(plain)

    def hlo_text(self) -> str:
        return "" if self._latest is None else self._latest.hlo_text()

    def memory_use(self) -> MemoryUse:
        return self._compiled.memory_use()

    def cost(self) -> dict[str, float]:
        return {} if self._latest is None else self._latest.cost()

    def serialize(self) -> bytes | None:
        return None if self._latest is None else self._latest.serialize()

    @property
    def _compiled(self) -> Executable:
        """The program that was compiled last; that for one device if none was."""
        return self._latest if self._latest is not None else self._compile_plain()

    def _set_plain(self, plain: Executable) -> Run:
        """From now on calls run the program for one device without a look at their arguments."""
        assert isinstance(plain, PjrtExecutable)
        plain.on_refusal = self._run_refused
        self.run = plain.run
        return plain.run

    def _compile_plain(self) -> Executable:
        plain = self._compile(self._find_graph())
        if self.run == self._run_as_sharded and not self._runs:
            self._set_plain(plain)
        return plain

    def _run_refused(self, arguments: Sequence[Buffer]) -> list[Buffer] | None:
        """Serves a call that the program for one device refused; None if no argument is on a mesh."""
        key = self._devices.key_of(arguments)
        if not any(key):
            return None
        self.run = self._run_as_sharded
        return self._run_as_sharded(arguments)

    def _run_as_sharded(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        key = self._devices.key_of(arguments)
        return self._runs.get_or_make(key, lambda: self._make(key, arguments))(arguments)

    def _make(self, key: tuple[int, ...], arguments: Sequence[Buffer]) -> Run:
        shardings = [sharding_of(each) if place else None for each, place in zip(arguments, key, strict=True)]
        mesh = _common_mesh(shardings)
        if mesh is not None:
            return self._make_sharded(mesh, shardings)
        plain = self._compile(self._find_graph())
        return plain.run if self._runs else self._set_plain(plain)

    def _make_sharded(self, mesh: Mesh, shardings: Sequence[Sharding | None]) -> Run:
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
        self._devices.programs[executable] = f"{self._pipeline.origin.what} on {mesh}"
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


def compile_for_devices(pipeline: Pipeline, graph: Graph, spent: CompileTiming, *, fold: bool = False) -> Executable:
    """As `Pipeline.compile`; where the client has several devices, a program that may be sharded.

    If a mesh was made, the program is lowered, and XLA compiles it when its first call says how it is sharded.
    """
    devices = pipeline.client.mesh_devices
    if devices is None:
        return pipeline.compile(graph, spent, fold=fold)
    calls = pipeline.list_calls(graph)
    if calls.ranks:  # of process groups, whose tensors are on one device of each process
        return pipeline.compile_calls(calls, spent, fold=fold)
    if not devices.in_use:
        return ShardedProgram(pipeline, devices, lambda: calls, fold, pipeline.compile_calls(calls, spent, fold=fold))
    pipeline.make_lowering().functions(calls)
    return ShardedProgram(pipeline, devices, lambda: calls, fold)


def make_shardable(
    pipeline: Pipeline, plain: Executable, find_graph: Callable[[], Graph], *, fold: bool = False
) -> Executable:
    """A program for one device as one that may be sharded, where the client has several.

    Args:
        find_graph: gives its graph, which is needed where an argument is sharded.
    """
    devices = pipeline.client.mesh_devices
    if devices is None or isinstance(plain, JointExecutable):
        return plain
    return ShardedProgram(pipeline, devices, lambda: pipeline.list_calls(find_graph()), fold, plain)


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
