"""Runs the Python blocks of a page, in order and in one namespace: `python -m tests.guide.run_page docs/slow.md`.

A comment in the line above a block's fence says otherwise: `<!-- script -->` runs it as a file of its own, in a process of its
own, and `<!-- not run: reason -->` does not run it; `<!-- file models.py -->` also writes it to the end of such a file, for the
commands of the page. These are lines that begin with "$ " in blocks of ```console, with what they print below them. A block's
code has the lines of the page, so that a traceback and a report name those.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>python|console)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARKS = re.compile(r"script|not run: \S.*|file \w+\.py")
_WORDS = re.compile(r"[a-z][a-z-]{3,}")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a page.

    Attributes:
        page: the file.
        line: number of its first line in the page.
        code: its text.
        mark: what the comment above it says; empty without one.
        language: "python" or "console".
    """

    page: Path
    line: int
    code: str
    mark: str
    language: str = "python"

    def run(self, namespace: dict[str, Any], folder: Path) -> None:
        """Runs the code in the namespace, or the commands in the folder; a block with a file is added to it."""
        if self.language == "console":
            self._run_commands(folder)
            return
        if self.mark.startswith("file "):
            with (folder / self.mark.removeprefix("file ")).open("a", encoding="utf-8") as file:
                file.write(self.code)
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)

    def _run_commands(self, folder: Path) -> None:
        """Runs commands.

        Raises:
            AssertionError: one failed, or printed less than four fifths of the words that the page shows.
        """
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        for part in re.split(r"^\$ ", self.code, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
            done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            words = set(_WORDS.findall(shown))
            lacking = words - set(_WORDS.findall(done.stdout))
            assert len(lacking) <= len(words) // 5, f"{command}: no more {sorted(lacking)} in {done.stdout}"

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
        yield Block(page, text.count("\n", 0, found.start("code")) + 1, found["code"], mark, found["language"])


def run_page(page: Path, *, scripts: bool) -> None:
    """Runs the blocks of a page: those of one namespace, or its scripts."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        for block in find_blocks(page):
            if block.mark == "script" and scripts:
                block.run_script()
            elif (not block.mark or block.mark.startswith("file ")) and not scripts:
                block.run(namespace, Path(folder))


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).resolve(), scripts="--scripts" in sys.argv)
