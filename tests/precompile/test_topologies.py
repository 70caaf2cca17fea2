"""The compiler of a topology runs in a child: what kills it is an error of one program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from dynaxla.errors import CompileCrashed, CompileError, CompileOutOfMemory, CompileTimeout, TargetError
from dynaxla.options import Limits
from dynaxla.runtime.topologies import PjrtTopology
from dynaxla.targets.chips import TPU_CHIPS, Roofline
from dynaxla.targets.registry import find_target
from dynaxla.targets.tpu import _TO_COMPILE, tpu_identity
from tests.precompile.test_compile_for_target import needs_libtpu

MODULE = b"module { func.func @main(%x: tensor<8x128xf32>) -> tensor<8x128xf32> { return %x : tensor<8x128xf32> } }"
PLENTY = Limits(300.0, 16 << 30)


@pytest.fixture(scope="module")
def compiler() -> Iterator[PjrtTopology]:
    made = PjrtTopology("tpu", "v5e:1x1", _TO_COMPILE, tpu_identity, inject_faults=True)
    yield made
    made.child.close()


@needs_libtpu
def test_a_program_elsewhere_can_be_kept_and_asked_about(compiler: PjrtTopology) -> None:
    program = compiler.compile(MODULE, PLENTY)
    assert program.serialize()
    assert program.memory_use().arguments_bytes >= 8 * 128 * 4
    assert "ENTRY" in program.hlo_text()
    compiler.compile(MODULE.replace(b"8x", b"16x"), PLENTY)
    assert "f32[8,128]" in program.hlo_text(), "also when the child has compiled another since"


@needs_libtpu
@pytest.mark.parametrize(
    ("fault", "limits", "error"),
    [
        (b"fault:abort", PLENTY, CompileCrashed),
        (b"fault:sleep", Limits(0.5, 16 << 30), CompileTimeout),
        (b"fault:allocate", PLENTY, CompileOutOfMemory),
        (b"no module", PLENTY, CompileError),
    ],
)
def test_what_ends_the_compiler_ends_no_process(
    fault: bytes, limits: Limits, error: type[CompileError], compiler: PjrtTopology
) -> None:
    with pytest.raises(error):
        compiler.compile(fault, limits)
    assert compiler.compile(MODULE, PLENTY).serialize(), "the next program gets a compiler"


@needs_libtpu
def test_no_such_topology() -> None:
    target = find_target("tpu:v5e:3x1x7")
    assert target.compiler is not None
    with pytest.raises(TargetError, match="v5e:3x1x7"):
        target.compiler()


@needs_libtpu
def test_this_process_loads_no_tpu_compiler() -> None:
    script = "\n".join(
        [
            "import os, torch, dynaxla",
            "before = dict(os.environ)",
            "dynaxla.compile_for_target(torch.nn.Linear(4, 4), (torch.randn(2, 4),), target='tpu:v5e:1x1')",
            "assert dict(os.environ) == before",
            "assert 'libtpu' not in open('/proc/self/maps').read()",
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_least_time_is_the_longer_of_computing_and_reading() -> None:
    chip = TPU_CHIPS["v6e"]
    computing, reading = Roofline.of(chip, 918e12, 0.0), Roofline.of(chip, 918e9, 1638e9)
    assert (computing.seconds, computing.bound) == (1.0, "compute")
    assert (reading.compute_s, reading.seconds, reading.bound) == (0.001, 1.0, "memory")
    for chip in TPU_CHIPS.values():
        assert chip.source.endswith(chip.name)
        assert 1e14 < chip.flops_per_s < 1e15
        assert 8e11 < chip.hbm_bytes_per_s < 3e12
