"""Runs a function in several processes of one process group, as torchrun would."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dynaxla

RANKS = 2


def run_ranks(function: Callable[..., None], *args: Any, size: int = RANKS, backend: str = "dynaxla") -> None:
    """Calls `function(rank, *args)` in as many processes, each with a device that knows the others'; raises what one raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_run, (function, args, size, backend, port), nprocs=size)


def _run(rank: int, function: Callable[..., None], args: Any, size: int, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dynaxla.use("cpu")
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def run_group(function: Callable[..., None], folder: Path, *args: Any, size: int = RANKS) -> list[Any]:
    """What each process saved by `save`."""
    run_ranks(function, str(folder), *args, size=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def save(folder: str, found: Any) -> None:
    torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")
