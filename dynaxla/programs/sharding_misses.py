"""Calls of parts whose program is there, but not for how their arguments are sharded: the function's policy decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynaxla.bucketing.shape_keys import ShapeKey
from dynaxla.programs.miss_policy import MissPolicy
from dynaxla.programs.part_compiler import PartCompiler
from dynaxla.programs.program import Program
from dynaxla.programs.sharded_program import ShardingMiss
from dynaxla.runtime.mesh_devices import MeshDevices
from dynaxla.torch_api.gc_guard import pause_collection

RunProgram = Callable[[Program, tuple[int, ...], Sequence[Any]], list[Any]]
"""The results of a part's program for a call's sizes and arguments, as `ArgumentBinder.run` gives them."""


def serve_shardings(
    run: RunProgram, compiler: PartCompiler, policy: Callable[[], MissPolicy]
) -> tuple[RunProgram, Callable[[], MissPolicy]]:
    """How a part's programs are run, and the policy of its calls, where their arguments may be sharded.

    Args:
        run: runs a program.
        policy: gives the policy of the compiled function that is being called.
    """
    devices = compiler.pipeline.client.mesh_devices
    if devices is None:
        return run, policy
    calls = ShardedCalls(run, compiler, policy, devices)
    return calls.run, calls.choose_policy


class ShardedCalls:
    """The calls of one part in a process that has several devices.

    Args:
        run: runs a program.
        compiler: of the part.
        policy: gives the policy of the compiled function that is being called.
        devices: of meshes.
    """

    def __init__(
        self, run: RunProgram, compiler: PartCompiler, policy: Callable[[], MissPolicy], devices: MeshDevices
    ) -> None:
        self._run = run
        self._compiler = compiler
        self._policy = policy
        self._devices = devices
        self._is_told = False

    def run(self, program: Program, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        """As `ArgumentBinder.run`. The policy serves a call for whose shardings there is no program.

        Raises:
            FrozenError: the function is frozen, and its policy raises.
        """
        try:
            return self._run(program, values, args)
        except ShardingMiss as miss:
            missed = _MissedSharding(miss, self._compiler, lambda: self.run(program, values, args))
        served = self.choose_policy().serve(missed, (), values, args)
        return self.run(program, values, args) if served is None else served

    def choose_policy(self) -> MissPolicy:
        """The policy of a call: nothing is compiled behind calls once a mesh was made, which the report says."""
        policy = self._policy()
        if not self._devices.in_use or policy.on_mesh is policy:
            return policy
        if not self._is_told:
            self._is_told = True
            what = self._compiler.pipeline.origin.what
            self._compiler.pipeline.recorder.note(
                unshipped=f"a part of {what} is compiled in its calls, not behind them: a mesh was made, and op by op its "
                "results would be sharded otherwise meanwhile"
            )
        return policy.on_mesh


@dataclass(frozen=True, slots=True)
class _MissedSharding:
    """A call for whose shardings there is no program. It is the `MissedPart` of the policies."""

    miss: ShardingMiss
    compiler: PartCompiler
    call_again: Callable[[], list[Any]]

    def count_miss(self) -> None:
        self.compiler.pipeline.recorder.add(misses=1)

    def compile(self, key: ShapeKey, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        with pause_collection():
            self.miss.compile()
        return self.call_again()

    def compile_in_background(
        self, key: ShapeKey, values: tuple[int, ...], args: Sequence[Any], *, waits: bool
    ) -> list[Any]:
        return self.compile(key, values, args)

    def run_larger(self, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        return self.run_eager(values, args)

    def run_eager(self, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        self.compiler.pipeline.recorder.add(served_eager=1)
        return self.compiler.graphs.run_eager(args)

    def explain_miss(self, key: ShapeKey) -> str:
        return self.miss.explain()
