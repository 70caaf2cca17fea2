"""How torch.distributed gets the process groups of the device: the processes meet at the first one."""

from __future__ import annotations

from typing import Any

from dynaxla.distributed.group_programs import DeviceMemory
from dynaxla.distributed.group_table import group_table
from dynaxla.distributed.job import meet_in_store
from dynaxla.distributed.process_group import DeviceProcessGroup
from dynaxla.errors import DistributedError
from dynaxla.runtime.joined_client import DeviceCpuClient
from dynaxla.runtime.process_set import ProcessSet, joined_processes
from dynaxla.torch_api.c10d import make_gloo_group, prefix_store


class ProcessGroupMaker:
    """Makes process groups; `make` is what torch.distributed calls.

    Args:
        memory: of the device's tensors.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def make(self, options: Any, backend_options: Any) -> DeviceProcessGroup:
        """The group that torch.distributed describes.

        Raises:
            DistributedError: the device was used before, or the other processes did not come.
        """
        rank, size = options.group_rank, options.group_size
        ranks = list(options.global_ranks_in_group) or list(range(size))
        processes = self._meet(options)
        group_table().add(options.group_id, ranks, processes)
        host = make_gloo_group(prefix_store("host", options.store), rank, size, options.timeout)
        return DeviceProcessGroup(options.store, rank, host, ranks, self._memory, processes)

    def _meet(self, options: Any) -> ProcessSet:
        is_all, known = not options.global_ranks_in_group, joined_processes()
        if known is None and not is_all:
            raise DistributedError(
                "the first group of the device is not that of all processes",
                'call init_process_group("cpu:gloo,dynaxla:dynaxla")',
            )
        if known is None:
            known = self._join(options)
        elif is_all and (known.rank, known.size) != (options.group_rank, options.group_size):
            raise DistributedError(
                f"this process is rank {known.rank} of {known.size}, not {options.group_rank} of {options.group_size}",
                "a process that takes part in another set of processes is started anew",
            )
        known.check()
        return known

    def _join(self, options: Any) -> ProcessSet:
        client = self._memory.client
        if not isinstance(client, DeviceCpuClient):
            raise DistributedError(
                f"the {client.platform} client was made before the processes met, and knows no other process",
                "call dynaxla.distributed.initialize() before dynaxla.use()",
            )
        client.check_unused()
        processes = meet_in_store(options.store, options.group_rank, options.group_size, options.timeout)
        client.join(processes)
        return processes
