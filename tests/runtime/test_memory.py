"""A 400 MB model needs hardly more memory compiled than in eager: weights are shared, not copied."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys, torch

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def mlp(width, depth):
    layers = [torch.nn.utils.skip_init(torch.nn.Linear, width, width) for _ in range(depth)]
    for layer in layers:
        torch.nn.init.constant_(layer.weight, 1e-4)
        torch.nn.init.constant_(layer.bias, 1e-4)
    return torch.nn.Sequential(*layers)

def call(model, width):
    function = model if sys.argv[1] == "eager" else torch.compile(model, backend="dynaxla")
    with torch.no_grad():
        for _ in range(3):
            function(torch.ones(4, width))

call(mlp(16, 10), 16)  # libraries and compilers take their memory
before = resident_bytes()
call(mlp(3200, 10), 3200)
print(peak_bytes() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_peak_memory_of_a_400_mb_model() -> None:
    eager, compiled = (
        int(subprocess.run([sys.executable, "-c", MEASURE, way], capture_output=True, text=True, check=True).stdout)
        for way in ("eager", "dynaxla")
    )
    assert eager > 400e6
    assert compiled <= 1.2 * eager, f"{compiled / 1e6:.0f} MB compiled, {eager / 1e6:.0f} MB in eager"
