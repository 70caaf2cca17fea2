"""`explain`, in a process of its own: once JAX has loaded libtpu where no TPU is, XLA's profiler would end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_mistakes() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--full", "tests/explaining/check_mistakes.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-3000:]}"
