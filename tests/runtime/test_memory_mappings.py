"""A process that has nearly all of its memory mappings loads no more programs, and does not die."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from dynaxla.errors import CompileUnavailable
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.loaded_executables import MmapLimit
from dynaxla.runtime.pjrt_clients import cpu_client
from tests.tolerances import assert_close

here = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells of mappings")


def now() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


@here
def test_the_last_mappings_are_left_alone() -> None:
    MmapLimit(most=now() * 2).check()
    with pytest.raises(CompileUnavailable, match="memory mappings") as caught:
        MmapLimit(most=now()).check()
    assert "vm.max_map_count" in caught.value.hint


@here
def test_mappings_are_counted_seldom_while_there_is_room() -> None:
    mappings = MmapLimit(most=1 << 20)
    mappings.check()
    counted = mappings._uncounted
    assert counted > 10_000
    mappings.check()
    assert mappings._uncounted == counted - 1


@here
def test_what_nobody_holds_makes_room() -> None:
    class Held:
        """Pages of two kinds by turns, of which each is a mapping, in a cycle that only the collector finds."""

        def __init__(self) -> None:
            self.itself = self
            kinds = (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)
            self.pages = [mmap.mmap(-1, 4096, prot=kinds[i % 2]) for i in range(4000)]

    gc.collect()
    most = (now() + 2000) * 16 // 15
    held = Held()
    assert now() > most
    del held
    MmapLimit(most=most).check()


@here
def test_without_room_calls_run_in_eager_and_say_so(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda x: (x * 2).sin().sum(0), backend="dynaxla")
    monkeypatch.setattr(cpu_client(), "_mappings", MmapLimit(most=now()))
    with recorder.expect(executables=0):
        assert_close(compiled(x), (x * 2).sin().sum(0))
    told = recorder.snapshot().fallbacks
    assert any("memory mappings" in str(reason) for reason in told)
