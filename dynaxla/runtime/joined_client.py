"""The CPU client of the device: alone in its process, or joined with those of other processes."""

from __future__ import annotations

import atexit
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dynaxla.errors import CompileError, DistributedError, DynaxlaError
from dynaxla.isolation.forking import keep_alive
from dynaxla.options import Limits
from dynaxla.runtime import process_clients, xla
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.joint_programs import JointExecutable, add_header, describe_module, split_header
from dynaxla.runtime.loaded_executables import PjrtExecutable, compress_executable
from dynaxla.runtime.peer_signals import SharedStore
from dynaxla.runtime.peer_watch import JointProgram, PeerWatch
from dynaxla.runtime.pjrt_clients import CpuClient, cpu_client
from dynaxla.runtime.process_set import ProcessSet


class DeviceCpuClient(CpuClient):
    """The client of the device's tensors, which tensors of the host do not use.

    Until processes are joined, it is the embedded client, which computes in the caller's thread. Then it knows one device of
    each process, and computes in threads of its own: what waits for another process is what reads a value.

    Attributes:
        processes: those that it is joined with; None as long as it is alone.
    """

    def __init__(self) -> None:
        super().__init__(worker=cpu_client().worker)
        self.processes: ProcessSet | None = None
        self._watch: PeerWatch | None = None
        self._devices: dict[int, Any] = {}
        self._is_used = False
        self._import = self._import_first

    def _import_first(self, capsule: Any, device: Any, stream: Any) -> Buffer:
        self._is_used = True
        self._import = xla.load().to_buffer
        return self._import(capsule, device, stream)

    def check_unused(self) -> None:
        """
        Raises:
            DistributedError: the device was used before.
        """
        if self._is_used:
            raise DistributedError(
                "the device was used before the processes met: its memory is of a client that knows no other process",
                "call torch.distributed.init_process_group before the first tensor of the device is made",
            )

    def join(self, processes: ProcessSet, store: SharedStore, host: str | None, timeout_s: float) -> None:
        """Joins the clients of several processes; each of them calls this.

        Args:
            store: of all of these processes, for what they tell each other.
            host: where the others reach this process; None: its host's name.
            timeout_s: after so long without the others, a process raises.

        Raises:
            DistributedError: the device was used before, or the others did not come.
        """
        self.check_unused()
        try:
            self._client = process_clients.joined_cpu(processes.coordination, processes.rank, processes.size, host)
        except self._error as error:
            raise DistributedError(f"the processes' clients did not join: {error}") from error
        self._devices = {each.process_index: each for each in self._client.devices()}
        self._device = self._devices[processes.rank]
        keep_alive(self._client)  # a run that waits for a lost process never ends, and its destructor would wait for it
        self.processes, self._watch = processes, PeerWatch(processes, store, timeout_s)
        atexit.register(self._watch.leave)

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> Executable:  # type: ignore[override]
        """Compiles a pure StableHLO module, which may be of several processes (`xla.processes_of`).

        Raises:
            CompileError: XLA's compiler refused the module, crashed, or took too much time or memory.
        """
        program = describe_module(module)
        serialized = self.worker.compile(module, limits)
        if serialized is not None:
            return self.load(add_header(program, compress_executable(serialized)))
        if program is None:
            return PjrtExecutable(partial(self._compile_here, module, 1))
        raise CompileError("the program of several processes cannot be serialized", "report the module")

    def load(self, serialized: bytes, partitions: int = 1) -> Executable:  # type: ignore[override]
        """Loads a serialized executable, which may be of several processes.

        Raises:
            CompileError: the executable cannot be loaded.
        """
        program, own = split_header(serialized)
        if program is None:
            return super().load(serialized)
        loaded = PjrtExecutable(partial(self._load_joint, program, own), lambda handle: own)
        assert self.processes is not None
        assert self._watch is not None
        return JointExecutable(program, loaded, self.processes, self._watch)

    def _load_joint(self, program: JointProgram, serialized: bytes) -> Any:
        if not self._devices.keys() >= set(program.ranks):
            raise CompileError(f"{program.what} is a program of the processes {program.ranks}, which are not joined")
        replicas = [self._devices[rank] for rank in program.ranks]
        with self._loading:
            self._mappings.check()
            try:
                return xla.load_on(self._client, replicas, zlib.decompress(serialized), replicas=True)
            except (self._error, zlib.error) as error:
                raise CompileError(f"XLA's cpu client refused a program of several processes: {error}") from error

    def _load(self, serialized: bytes, partitions: int) -> Any:
        self._is_used = True
        return super()._load(serialized, partitions)

    def wait_for(self, buffer: Buffer, timeout_s: float | None = None) -> None:
        """Waits for the run that computes a buffer.

        Raises:
            DistributedError: another process is lost or computes something else.
            ExecutionError: the run failed.
        """
        if self.processes is not None:
            self.processes.wait_for(buffer, timeout_s)
        super().wait_for(buffer)

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        if self.processes is not None:
            self.processes.wait_for(buffer)
        return super().to_tensor(buffer)

    def make_run_error(self, error: Exception) -> DynaxlaError:
        own = super().make_run_error(error)
        return own if self.processes is None else self.processes.explain(own)

    def identity(self) -> Mapping[str, str]:
        """That of a client of this process alone: XLA's fingerprint has a process's number, on which no program depends."""
        own = super().identity()
        return own if self.processes is None else {**own, "fingerprint": xla.fingerprint(cpu_client().device)}

    def replicas(self, ranks: Sequence[int]) -> list[Any]:
        """The devices of these processes."""
        return [self._devices[rank] for rank in ranks]
