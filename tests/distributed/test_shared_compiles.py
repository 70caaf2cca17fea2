"""Processes that want one program at the same time: one compiles it, the others load what it stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import dynaxla
from dynaxla.runtime.executable_cache import ExecutableCache
from tests.distributed.children import run_group, save


def _compute(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).softmax(-1) * 3


def _collect(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(x.sin(), "sum", dist.group.WORLD) + 1


def count_compiles(rank: int, folder: str) -> None:
    counts = {}
    x = torch.full((5, 7), rank + 1.0, device="dynaxla")
    for function in (_compute, _collect):
        dist.barrier()
        before = dynaxla.read_metrics()
        result = torch.compile(function, backend="dynaxla")(x).cpu()
        after = dynaxla.read_metrics()
        counts[function.__name__] = after.compiles - before.compiles, after.loads - before.loads
        assert torch.isfinite(result).all()
    made: list[Any] = []
    compile_module = ExecutableCache.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExecutableCache, "compile", lambda *args: made.append(args) or compile_module(*args))
        dist.broadcast(x, 1)
    assert x.flatten()[0].item() == 2.0
    save(folder, (counts, len(made)))


def test_one_compiles_and_the_others_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with collectives, too, and those of single collectives: each process loads them on its own device."""
    monkeypatch.setenv("DYNAXLA_CACHE_DIR", str(tmp_path / "cache"))
    found = run_group(count_compiles, tmp_path)
    for name in ("_compute", "_collect"):
        assert sorted(counts[name] for counts, _ in found) == [(0, 1), (1, 0)], (name, found)
    assert sorted(made for _, made in found) == [0, 1], found
