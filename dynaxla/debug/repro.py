"""A script that shows a failure of a native compiler on its own."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Literal

import platformdirs

_SCRIPT = '''r"""Shows how {compiler} fails.

{reason}

Run it with the Python that has dynaxla: it gives {compiler} the module below in a child process and prints what happens.
"""

import subprocess
import sys

MODULE = r"""
{module}
"""

CHILD = """
import sys
{child}
"""

done = subprocess.run([sys.executable, "-c", CHILD], input=MODULE.encode(), capture_output=True)
print(done.stdout.decode()[-4000:])
print(done.stderr.decode()[-4000:])
print("exit status", done.returncode)
'''
_CHILDREN = {
    "torch-mlir": "from dynaxla.lowering import passes\nprint(passes.lower(sys.stdin.buffer.read(), VERSION))",
    "XLA": "from dynaxla.runtime import xla\nprint(xla.compile_module(sys.stdin.buffer.read()))",
}


def write_repro(
    compiler: Literal["torch-mlir", "XLA"], module: str, reason: str, version: str = "", folder: Path | None = None
) -> Path:
    """Writes a self-contained script; the same failure gives the same file.

    Args:
        compiler: which one fails.
        module: text, in the torch dialect for torch-mlir and in StableHLO for XLA.
        reason: what happened, readable.
        version: the StableHLO version that torch-mlir lowers to.
        folder: default: "repros" in the user's cache folder of this package.
    """
    folder = folder or platformdirs.user_cache_path("dynaxla") / "repros"
    folder.mkdir(parents=True, exist_ok=True)
    child = _CHILDREN[compiler].replace("VERSION", repr(version))
    said = reason.replace('"""', "'''")
    text = _SCRIPT.format(compiler=compiler, module=module.strip(), reason=said, child=child)
    path = folder / f"repro_{hashlib.sha256(module.encode()).hexdigest()[:16]}.py"
    # A reader never sees half a script: write aside, then rename.
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    os.replace(temporary, path)
    return path
