"""A script that shows a failure of torch-mlir on its own."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import platformdirs

_SCRIPT = '''r"""Shows how torch-mlir fails on one op.

{reason}

Run it with the Python that has torch-mlir: it lowers the module below in a child process and prints what happens.
"""

import subprocess
import sys

MODULE = r"""
{module}
"""

CHILD = """
import sys
from dynaxla.lowering import passes
print(passes.lower(sys.stdin.buffer.read(), {version!r}))
"""

done = subprocess.run([sys.executable, "-c", CHILD], input=MODULE.encode(), capture_output=True)
print(done.stdout.decode()[-4000:])
print(done.stderr.decode()[-4000:])
print("exit status", done.returncode)
'''


def write_repro(module: str, reason: str, version: str, folder: Path | None = None) -> Path:
    """Writes a self-contained script; the same failure gives the same file.

    Args:
        module: the torch-dialect text of the op alone.
        reason: what happened, readable.
        version: the StableHLO version to lower to.
        folder: default: "repros" in the user's cache folder of this package.
    """
    folder = folder or platformdirs.user_cache_path("dynaxla") / "repros"
    folder.mkdir(parents=True, exist_ok=True)
    text = _SCRIPT.format(module=module.strip(), reason=reason.replace('"""', "'''"), version=version)
    path = folder / f"repro_{hashlib.sha256(module.encode()).hexdigest()[:16]}.py"
    # A reader never sees half a script: write aside, then rename.
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    os.replace(temporary, path)
    return path
