"""Profiles, in processes of their own: once JAX has loaded libtpu where no TPU is, XLA's profiler would end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.precompile.test_compile_for_target import needs_libtpu

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("checks", ["check_profiles", pytest.param("check_engine", marks=pytest.mark.long)])
def test_profiles(checks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--full", f"tests/profiling/{checks}.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-3000:]}"


WITH_LIBTPU = """
import jax, torch, dynaxla
from torch.profiler import ProfilerActivity, profile
from dynaxla.errors import ProfileError

jax.devices()  # loads libtpu, which finds no chip
compiled = torch.compile(lambda x: x.sin(), backend="dynaxla")
try:
    with dynaxla.profile():
        raise AssertionError("it began")
except ProfileError as error:
    assert "JAX_PLATFORMS=cpu" in error.hint
with profile(activities=[ProfilerActivity.CPU]):
    compiled(torch.ones(3))
print("alive")
"""


@needs_libtpu
def test_libtpu_without_a_chip_ends_no_process() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", WITH_LIBTPU], capture_output=True, text=True, env=environment)
    assert done.stdout.endswith("alive\n"), done.stderr[-2000:]
    assert "shows the host alone" in done.stderr
