"""Every stage of every compiled graph, as numbered files."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Collection
from pathlib import Path

_NUMBERS = {"fx": "01", "torch": "02", "stablehlo": "03", "hlo": "04"}
_SUFFIXES = {"fx": "txt", "torch": "mlir", "stablehlo": "mlir", "hlo": "txt"}


class Dump:
    """Writes `root/p<pid>_graph_<n>/<number>_<stage>_<k>.<suffix>`: one folder per graph, one file per program, stage.

    `k` is the program's number within its graph. A program begins with its "fx" stage and stays in one thread, so its
    files share `k` also where an earlier program failed half-way.

    Args:
        root: None writes nothing, at the cost of one attribute read.
        stages: the stages to write: of "fx", "torch", "stablehlo", "hlo".
    """

    def __init__(self, root: Path | None, stages: Collection[str]) -> None:
        self.enabled = root is not None
        self._stages = frozenset(stages)
        self._folder = None if root is None else _new_folder(root)
        self._programs = itertools.count()
        self._current = threading.local()

    @property
    def folder(self) -> Path | None:
        """Where this graph's files lie."""
        return self._folder

    def write(self, stage: str, text: str) -> Path | None:
        """Writes one stage of this thread's program, "fx" first; None if the stage was not asked for."""
        if stage == "fx":
            self._current.program = next(self._programs)
        if self._folder is None or stage not in self._stages:
            return None
        path = self._folder / f"{_NUMBERS[stage]}_{stage}_{self._current.program}.{_SUFFIXES[stage]}"
        path.write_text(text, encoding="utf-8")
        return path


def _new_folder(root: Path) -> Path:
    """A folder nobody else has: several graphs, threads and processes may dump into one root."""
    for number in itertools.count():
        folder = root / f"p{os.getpid()}_graph_{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the count is endless")
