"""On which thread backward passes run, and what they raise; in processes of their own, which begin with one on the host."""

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


_INTERRUPTED = """
import signal, sys
import torch
import dynaxla
dynaxla.use("cpu")
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(frame, event, given):
    if event == "call" and frame.f_code.co_name == "_take_error":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

x = torch.full((3,), 2.0, device="dynaxla", requires_grad=True)
y = (x * x).sum()
sys.setprofile(interrupt)
try:
    y.backward()
except KeyboardInterrupt:
    print("interrupted")
print(x.grad.tolist() == [4.0] * 3)
"""


_INTERRUPTED_FORWARD = """
import sys
import torch
import dynaxla
dynaxla.use("cpu")
x = torch.full((3,), 2.0, device="dynaxla", requires_grad=True)
(x * x).sum().backward()
entered = set()

def note(frame, event, given):
    if event == "call":
        entered.add(frame.f_code.co_filename.rpartition("/")[2])

sys.setprofile(note)
x * x
sys.setprofile(None)
print("backward_passes.py" in entered)  # no function of Python that torch enters where it makes the node
"""


@boundary("backward_passes.guard")
def test_no_interrupt_can_come_where_a_node_is_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_FORWARD], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.split() == ["False"], done.stderr[-2000:]


@boundary("backward_passes.run_backward_in_caller")
def test_an_interrupt_where_nothing_may_be_raised_comes_behind_the_pass() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["interrupted", "True"], done.stderr[-2000:]


_RAISES = """
import torch
import dynaxla
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
dynaxla.use("cpu")

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        raise KeyError("mode")

class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("node")

def hook(gradient):
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise LookupError("hook") from error

def hooked(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(hook)
    return y

def raised(run):
    try:
        run()
    except Exception as error:
        return error

x = torch.ones(3, device="dynaxla", requires_grad=True)
result = (x * x).sum()
with Mode():
    found = [raised(result.backward)]
for loss in (Node.apply(x), hooked(x), checkpoint(hooked, x, use_reentrant=True), checkpoint(hooked, x, use_reentrant=False)):
    found.append(raised(loss.sum().backward))
found.append(raised(lambda: torch.autograd.grad(hooked(x).sum(), x)))
print(*(type(error).__name__ for error in found))
print(*(repr(error.__cause__) for error in found[2:]))
x.grad = None
(x * 3).sum().backward()
print(x.grad.tolist())
"""


@boundary("backward_passes.Guard")
def test_what_a_hook_or_a_kernel_raises_in_a_backward_pass_is_raised_by_it() -> None:
    """torch ends the process where the guard does not take it."""
    done = subprocess.run([sys.executable, "-c", _RAISES], capture_output=True, text=True, cwd=ROOT, timeout=120)
    names, causes, gradient = done.stdout.splitlines() or [done.stderr[-2000:]] * 3
    assert names.split() == ["KeyError", "ValueError", *["LookupError"] * 4]
    assert causes.count("ZeroDivisionError('division by zero')") == 4
    assert gradient == "[3.0, 3.0, 3.0]"
