"""docs/errors.md is written from the exceptions, and every example on it raises its error."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.error_examples import EXAMPLES
from docs.write_errors import write_errors
from dynaxla import errors

ROOT = Path(__file__).parents[2]
BASES = {"DX000", "DX300", "DX700"}
_LIBTPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
NEEDS = {"DX180": _LIBTPU}
SCRIPTS = [name for name, example in EXAMPLES.items() if example.processes]


def test_the_page_is_what_the_exceptions_are() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert write_errors() == page, "python -m docs.write_errors > docs/errors.md"


def test_every_error_has_an_example() -> None:
    ids = {
        kind.id for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DynaxlaError)
    }
    assert EXAMPLES.keys() == ids - BASES


def test_every_example_raises_its_error() -> None:
    command = [sys.executable, "-m", "tests.guide.run_error_examples"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    raised = json.loads(done.stdout)
    for name, example in EXAMPLES.items():
        if example.reason:
            assert raised.pop(name) == f"DX200 {example.reason}"
    assert raised.pop("DX200") == "DX200 custom_op"
    assert raised == {name: name for name in raised}
    assert raised.keys() | set(SCRIPTS) | {"DX200", "DX310"} == EXAMPLES.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in SCRIPTS])
def test_every_script_raises_its_error(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXAMPLES[name].code, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={EXAMPLES[name].processes}", "--standalone"]
    command = [sys.executable, *(launch if EXAMPLES[name].processes > 1 else []), str(script)]
    environment = {**{n: v for n, v in os.environ.items() if n != "JAX_PLATFORMS"}, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode != 0
    assert f"{name} " in done.stderr, done.stderr
