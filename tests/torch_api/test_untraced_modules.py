"""What the wall relies on where Dynamo leaves modules to Python."""

from __future__ import annotations

import subprocess
import sys

from tests.torch_api.boundary import boundary


@boundary("dynamo.leave_modules_to_python")
def test_modules_are_left_to_python() -> None:
    """In a process of its own, as nothing takes them back."""
    script = """
import torch
from dynaxla import mesh
from dynaxla.torch_api import dynamo
from dynaxla.lowering import link

assert not dynamo.is_left_to_python(mesh.parse_dims) and not dynamo.is_left_to_python(link.link)
dynamo.leave_modules_to_python(["dynaxla.mesh", "dynaxla.lowering"])
assert dynamo.is_left_to_python(mesh.parse_dims) and dynamo.is_left_to_python(link.link)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
