"""`dynaxla.distributed.initialize`: the processes of a job meet before the device is used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dynaxla.errors import DistributedError
from dynaxla.runtime import xla
from dynaxla.runtime.peer_watch import PeerWatch
from dynaxla.runtime.process_set import ProcessSet, find_own_address, joined_processes, meet_processes
from dynaxla.torch_api.c10d import host_of_store, meet_by_environment, prefix_store
from dynaxla.torch_api.private_device import get_registered_device_type
from dynaxla.torch_api.pytree import tree_map_only
from dynaxla.types import DEVICE_TYPE

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def initialize(
    address: str | None = None, processes: int | None = None, rank: int | None = None, *, timeout_s: float = 600.0
) -> None:
    """Has the processes of a job meet, before `dynaxla.use`: the device's client then knows the devices of all of them.

    Without arguments they are found: under torchrun by its variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), else as
    `jax.distributed` finds them, on TPU pods, in Slurm, Open MPI and Kubernetes.

    Args:
        address: "host:port" of process 0, where all reach it, with a port that is free there.
        processes: their number.
        rank: this process's number, from 0.
        timeout_s: so many seconds the others are waited for, now and by every program.

    Raises:
        DistributedError: some arguments are lacking, a process did not come, the processes have met already, or the device is
            in use.
    """
    given = (address, processes, rank)
    if any(each is None for each in given) and any(each is not None for each in given):
        raise DistributedError(f"address={address}, processes={processes}, rank={rank}", "give all three, or none")
    if address is None and all(name in os.environ for name in _TORCHRUN):
        _check_no_device()
        limit = timedelta(seconds=timeout_s)
        store, rank, processes = meet_by_environment(limit)
        meet_in_store(store, rank, processes, limit)
        return
    if address is None:
        address, processes, rank = xla.find_cluster(int(timeout_s))
    if address is None or processes is None or rank is None:
        raise DistributedError(
            "no job is found that this process is a part of",
            "start it with torchrun or dynaxla.launch, or give address, processes and rank",
        )
    if not 0 <= rank < processes or not address.rpartition(":")[2].isdecimal():
        raise DistributedError(
            f"there is no process {rank} of {processes} at {address!r}", "address='host:port', 0 <= rank < processes"
        )
    _check_no_device()
    own = find_own_address(address.rpartition(":")[0])
    PeerWatch(meet_processes(rank, processes, own, address, timeout_s))


def _check_no_device() -> None:
    if get_registered_device_type() == DEVICE_TYPE:
        raise DistributedError(
            "the device was chosen before the processes met",
            "call dynaxla.distributed.initialize() before dynaxla.use()",
        )


def process_index() -> int:
    """This process's number in the job, from 0; 0 where it has met no others."""
    known = joined_processes()
    return 0 if known is None else known.rank


def process_count() -> int:
    """The number of processes of the job; 1 where this one has met no others."""
    known = joined_processes()
    return 1 if known is None else known.size


def save(value: Any, file: str | os.PathLike[str]) -> None:
    """Writes what `torch.save` takes, with its device tensors on the host: all processes read it, and process 0 writes it.

    Returns in every process when the file is there.

    Raises:
        DistributedError: another process is lost, or does not come.
    """
    read = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
    known = joined_processes()
    if known is None or known.rank == 0:
        partial = Path(f"{os.fspath(file)}.part")
        torch.save(read, partial)
        partial.replace(file)
    if known is not None:
        known.watch.meet()


@dataclass(frozen=True, slots=True)
class _InStore:
    """Processes agree on an address in a store of torch.distributed's."""

    store: Any

    def agree(self, address: str | None) -> str:
        if address is None:
            return str(self.store.get("coordinator").decode())
        self.store.set("coordinator", address)
        return address


def meet_in_store(store: Any, rank: int, processes: int, limit: timedelta) -> ProcessSet:
    """Has the processes of a store of torch.distributed's meet.

    Raises:
        DistributedError: one of them did not come, or they have met already.
    """
    own, place = find_own_address(host_of_store(store)), _InStore(prefix_store("processes", store))
    met = meet_processes(rank, processes, own, place, limit.total_seconds())
    PeerWatch(met)
    return met
