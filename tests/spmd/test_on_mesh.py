"""Tensors and models over eight devices of the CPU, in processes of their own: torch has one device "dynaxla" per process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaxla.device.registration import PLATFORM_VARIABLE

ROOT = Path(__file__).parents[2]
LONGEST_S = 1200

pytestmark = pytest.mark.timeout(LONGEST_S + 60)


def _run(name: str) -> None:
    """Runs the tests of a file of `on_mesh`, which are collected only there."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--full", f"tests/spmd/on_mesh/{name}.py"]
    environ = {key: value for key, value in os.environ.items() if key != PLATFORM_VARIABLE}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=LONGEST_S)
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", ["check_tensors", "check_graphs"])
def test_on_a_mesh(name: str) -> None:
    _run(name)


@pytest.mark.long
def test_models_on_a_mesh() -> None:
    _run("check_models")
