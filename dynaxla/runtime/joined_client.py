"""The CPU client of the device: alone in its process, or joined with those of other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaxla.errors import DistributedError
from dynaxla.isolation.forking import keep_alive
from dynaxla.runtime import process_clients, xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.loaded_executables import PjrtExecutable
from dynaxla.runtime.peer_watch import JointProgram
from dynaxla.runtime.pjrt_clients import CpuClient, cpu_client
from dynaxla.runtime.process_set import ProcessSet


class DeviceCpuClient(CpuClient):
    """The client of the device's tensors, which tensors of the host do not use.

    Until processes are joined, it is the embedded client, which computes in the caller's thread. Then it knows the devices of
    each process, and computes in threads of its own: what waits for another process is what reads a value.
    """

    def __init__(self) -> None:
        super().__init__(worker=cpu_client().worker)
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

    def join(self, processes: ProcessSet, devices: int = 1) -> None:
        """Joins the clients of several processes; each of them calls this.

        Args:
            devices: as how many devices the processor is shown in this process.

        Raises:
            DistributedError: the device was used before, or the others did not come.
        """
        self.check_unused()
        try:
            self._client = process_clients.joined_cpu(
                processes.coordination, processes.rank, processes.size, processes.host, devices
            )
        except self._error as error:
            raise DistributedError(f"the processes' clients did not join: {error}") from error
        self._device = self._client.local_devices()[0]
        self.executable_class = PjrtExecutable
        keep_alive(self._client)  # a run that waits for a lost process never ends, and its destructor would wait for it
        super().join(processes)

    def _load(self, program: JointProgram | None, serialized: bytes, partitions: int) -> Any:
        self._is_used = True
        return super()._load(program, serialized, partitions)

    def identity(self) -> Mapping[str, str]:
        """That of a client of this process alone: XLA's fingerprint has a process's number, on which no program depends."""
        own = super().identity()
        return own if self.peers is None else {**own, "fingerprint": xla.fingerprint(cpu_client().device)}
