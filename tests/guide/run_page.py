"""Runs the Python blocks of a page, in order and in one namespace: `python -m tests.guide.run_page docs/slow.md`.

A comment in the line above a block's fence says otherwise: `<!-- script -->` runs it as a file of its own, in a process of its
own, and `<!-- not run: reason -->` does not run it. A block's code has the lines of the page, so that a traceback and a report
name those.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKS = re.compile(r"script|not run: \S.*")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a page.

    Attributes:
        page: the file.
        line: number of its first line in the page.
        code: its text.
        mark: what the comment above it says; empty without one.
    """

    page: Path
    line: int
    code: str
    mark: str

    def run(self, namespace: dict[str, Any]) -> None:
        """Runs the code in the namespace."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)

    def run_script(self) -> None:
        """Runs the code as a file, in a process of its own.

        Raises:
            subprocess.CalledProcessError: it ended with another status than 0.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.page.stem}_{self.line}.py"
            path.write_text(self.code, encoding="utf-8")
            environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
            subprocess.run([sys.executable, str(path)], env=environment, check=True)


def find_blocks(page: Path) -> Iterator[Block]:
    """The Python blocks of a page.

    Raises:
        ValueError: the comment above a block's fence is none of those that mark one.
    """
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        mark = found["mark"] or ""
        if mark and not _MARKS.fullmatch(mark):
            raise ValueError(f"{page.name}: a block is marked by 'script' or 'not run: reason', not by {mark!r}")
        yield Block(page, text.count("\n", 0, found.start("code")) + 1, found["code"], mark)


def run_page(page: Path, *, scripts: bool) -> None:
    """Runs the blocks of a page: those of one namespace, or its scripts."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in find_blocks(page):
        if block.mark == "script" and scripts:
            block.run_script()
        elif not block.mark and not scripts:
            block.run(namespace)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).resolve(), scripts="--scripts" in sys.argv)
