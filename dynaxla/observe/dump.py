"""Dumps every stage of every compiled graph to numbered files."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

_NUMBERS = {"passes": "00", "fx": "01", "torch": "02", "stablehlo": "03", "hlo": "04"}
_SUFFIXES = {"fx": "txt", "torch": "mlir", "stablehlo": "mlir", "hlo": "txt"}


class Dump:
    """Writes one folder per graph, `root/p<pid>_graph_<n>`, with one file per pass, and one per program and stage.

    A pass that changed the graph is written as `00_passes_<k>_<name>.py`, with the graph's tensors in a `.pt` file
    (`observe/compare_passes.py` runs such files). A stage is written as `<number>_<stage>_<k>.<suffix>`; `k` is the
    program's number in its graph. A program begins with its "fx" stage and stays in one thread, so its files have the same
    `k` even if an earlier program failed half-way.

    Args:
        root: the parent folder; None writes nothing, at the cost of one attribute read.
        stages: the stages to write: of "passes", "fx", "torch", "stablehlo", "hlo".
    """

    def __init__(self, root: Path | None, stages: Collection[str]) -> None:
        self.enabled = root is not None
        self._stages = frozenset(stages)
        self._folder = None if root is None else _new_folder(root)
        self._programs = itertools.count()
        self._passes = itertools.count()
        self._last_pass = ""
        self._current = threading.local()

    @property
    def folder(self) -> Path | None:
        """The folder of this graph's files."""
        return self._folder

    def wants(self, stage: str) -> bool:
        """Whether this stage is written."""
        return self._folder is not None and stage in self._stages

    def write_pass(self, name: str, text: str, tensors: Mapping[str, torch.Tensor]) -> Path | None:
        """Writes the graph after a pass. Returns None if it did not change, or passes are not dumped."""
        if self._folder is None or "passes" not in self._stages or text == self._last_pass:
            return None
        self._last_pass = text
        path = self._folder / f"{_NUMBERS['passes']}_passes_{next(self._passes):02d}_{name}.py"
        path.write_text(text, encoding="utf-8")
        if tensors:
            torch.save(dict(tensors), path.with_suffix(".pt"))
        return path

    def write(self, stage: str, text: str) -> Path | None:
        """Writes one stage of this thread's program, "fx" first. Returns None if the stage is not dumped."""
        if stage == "fx":
            self._current.program = next(self._programs)
        if self._folder is None or stage not in self._stages:
            return None
        path = self._folder / f"{_NUMBERS[stage]}_{stage}_{self._current.program}.{_SUFFIXES[stage]}"
        path.write_text(text, encoding="utf-8")
        return path


def _new_folder(root: Path) -> Path:
    """Makes a folder with an unused number: several graphs, threads and processes may dump into one root."""
    for number in itertools.count():
        folder = root / f"p{os.getpid()}_graph_{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the count is endless")
