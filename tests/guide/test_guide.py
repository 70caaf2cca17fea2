"""The guide's code runs, its links resolve, and it is a site."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guide.run_page import find_blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDE = ("index", "from_torch_xla", "from_cuda", "slow", "dynamic_shapes", "precision", "environment")
READ = re.compile(
    r"environ(?:\.get\(|\[)\"([A-Z_]+)\"|_VARIABLE = \"([A-Z_]+)\"|^    \"((?:TPU|ALLOW)_[A-Z_]+)\": ", re.M
)
"""An environment variable that the package reads, or sets for a library."""


def _run_page(page: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "tests.guide.run_page", f"docs/{page}.md", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if page == "slow":  # once JAX has loaded libtpu where no TPU is, nothing can be profiled
        environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", GUIDE)
def test_the_code_of_a_page_runs(page: str) -> None:
    _run_page(page)


def test_programs_of_several_processes_run() -> None:
    _run_page("from_torch_xla", "--scripts")


def test_few_blocks_are_not_run() -> None:
    found = [block for page in GUIDE for block in find_blocks(DOCS / f"{page}.md")]
    blocks = [block for block in found if block.language == "python"]
    assert len(blocks) >= 40
    assert [block.page.stem for block in blocks if block.mark.startswith("not run")] == ["dynamic_shapes"]
    fences = sum((DOCS / f"{page}.md").read_text(encoding="utf-8").count("```python\n") for page in GUIDE)
    assert len(blocks) == fences


def test_the_readme_begins_with_code_that_runs(tmp_path: Path) -> None:
    first = next(find_blocks(ROOT / "README.md"))
    first.run({"__name__": "__main__"}, tmp_path)


def test_every_variable_is_on_the_page() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "dynaxla").rglob("*.py"))
    read = {name for names in READ.findall(sources) for name in names if name}
    assert {"DYNAXLA_DEBUG", "DYNAXLA_CACHE_DIR", "DYNAXLA_PLATFORM", "XLA_FLAGS", "LOCAL_RANK"} <= read
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    assert sorted(name for name in read if f"`{name}`" not in page) == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs, of the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every page is in the order of mkdocs.yml, and every link and anchor resolves."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
