"""`dynaxla.launch`: the processes, their group, their errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dynaxla
from dynaxla.errors import OptionError
from tests.interrupts import interruptible


def note(rank: int, folder: str, factor: float) -> None:
    """Writes what a process is, and a sum over all of them."""
    x = torch.full((3,), (rank + 1) * factor, device="dynaxla")
    dist.all_reduce(x)
    variables = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    torch.save((variables, dist.get_backend(), x.cpu()), Path(folder) / f"{rank}.pt")


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("a fault of the user's")
    dist.barrier()


def wait(rank: int, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


def test_processes_have_their_ranks_and_one_group(tmp_path: Path) -> None:
    dynaxla.launch(note, (str(tmp_path), 0.5), nprocs=2)
    for rank in range(2):
        variables, backend, total = torch.load(tmp_path / f"{rank}.pt")
        assert variables == [str(rank), str(rank), "2", "2"]
        assert backend == "dynaxla"
        assert total.tolist() == [1.5] * 3


@pytest.mark.long
def test_what_a_process_raises_is_raised() -> None:
    with pytest.raises(mp.ProcessRaisedException, match="a fault of the user's"):
        dynaxla.launch(fail, nprocs=2)


@pytest.mark.long
def test_an_interrupt_ends_the_processes(tmp_path: Path) -> None:
    """In a notebook it comes to the caller alone."""
    caller = threading.get_ident()

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.1)
        signal.pthread_kill(caller, signal.SIGINT)

    with interruptible():
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            dynaxla.launch(wait, (str(tmp_path),), nprocs=2)
    children = {child.pid: child for child in multiprocessing.active_children()}
    for pid in (int(each.name) for each in tmp_path.iterdir()):
        if pid in children:
            children[pid].join(30)
            assert not children[pid].is_alive()


def test_no_processes() -> None:
    with pytest.raises(OptionError, match="nprocs=0"):
        dynaxla.launch(fail, nprocs=0)
