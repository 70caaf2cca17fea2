"""`explain`, in a process of its own: once JAX has loaded libtpu where no TPU is, XLA's profiler would end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("checks", ["check_mistakes", "check_account"])
def test_explanations(checks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--full", f"tests/explaining/{checks}.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-3000:]}"
