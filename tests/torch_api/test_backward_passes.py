"""On which thread backward passes run; in a process of its own, which has run one before it has the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.torch_api.boundary import boundary

ROOT = Path(__file__).parents[2]
_LATE = """
import threading
import torch
torch.ones(2, requires_grad=True).sum().backward()
import dynaxla
dynaxla.use("cpu")
found = []

def train():
    x = torch.full((3,), 2.0, device="dynaxla", requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    ((x * x).sum().cpu() + (y.to("dynaxla") * x).sum().cpu()).backward()
    found.append(x.grad.tolist() + y.grad.tolist())

train()
thread = threading.Thread(target=train)
thread.start()
thread.join()
print(found == [[5.0] * 3 + [2.0] * 3] * 2)
"""


@boundary("backward_passes.run_backward_in_caller")
def test_backward_passes_came_before_the_device() -> None:
    done = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["True"], done.stderr[-2000:]
