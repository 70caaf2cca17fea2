"""Dynamo keeps its captures, where the user says so: with ours in them a second process neither captures nor compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dynaxla.isolation.disk import CACHE_VARIABLE


def process(what: str, folder: Path, saved: Path, module: str = "tests.aot_cache.precompiled") -> dict[str, Any]:
    environ = {**os.environ, CACHE_VARIABLE: str(folder / "own"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    command = [sys.executable, "-m", module, what, str(saved)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_second_machine_captures_nothing(tmp_path: Path) -> None:
    """Two graphs, forward and backward, three sizes. What another version saved is captured again, and right."""
    saved = tmp_path / "artifacts"
    assert process("save", tmp_path / "first", saved) == {"frames": 2, "captures_loaded": 0, "compiles": 8, "loads": 0}
    found = process("load", tmp_path / "second", saved)
    assert found == {"frames": 0, "captures_loaded": 4, "compiles": 0, "loads": 8}
    found = process("load-as-another", tmp_path / "third", saved)
    assert found == {"frames": 2, "captures_loaded": 0, "compiles": 0, "loads": 8}
