"""`dynaxla.launch`: starts several processes on this host, as torchrun does."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dynaxla.device.registration import use
from dynaxla.distributed.job import initialize
from dynaxla.errors import OptionError
from dynaxla.types import DEVICE_TYPE


def launch(
    function: Callable[..., None],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    platform: str = "cpu",
    *,
    devices: int | None = None,
) -> None:
    """Calls `function(rank, *args)` in `nprocs` new processes, in one process group "dynaxla", and waits for them.

    Each has devices of its own, and the variables that torchrun sets. Programs for more than one host, or that start again
    after failures, are started by torchrun itself.

    Args:
        function: can be pickled: a function of a module.
        nprocs: the number of processes; on "cpu" any.
        platform, devices: as `dynaxla.use` takes them in each process.

    Raises:
        OptionError: there is no such number of processes.
        torch.multiprocessing.ProcessRaisedException: a process raised; the others are ended.
    """
    if nprocs < 1:
        raise OptionError(f"nprocs={nprocs} is no number of processes", "start one or more")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = function, args, nprocs, platform, devices, port
    started: Any = mp.start_processes(_run, given, nprocs=nprocs, join=False, start_method="spawn")  # type: ignore[attr-defined]
    try:
        while not started.join():
            pass
    finally:  # a Ctrl-C in a notebook comes to this process alone
        for process in started.processes:
            process.terminate()


def _run(
    rank: int,
    function: Callable[..., None],
    args: tuple[Any, ...],
    size: int,
    platform: str,
    devices: int | None,
    port: int,
) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    initialize()
    use(platform, devices=devices)
    dist.init_process_group(DEVICE_TYPE)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
