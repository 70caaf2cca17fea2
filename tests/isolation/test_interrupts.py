"""An interrupt (Ctrl-C) leaves nothing half made that could not be made again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from dynaxla.isolation.interrupts import defer_interrupts
from dynaxla.isolation.once import once
from tests.interrupts import interrupt, interruptible

SCRIPT = """
import signal, sys
import torch, torch._dynamo

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored

MODULE, CALLS = sys.argv[1], int(sys.argv[2])
left = [CALLS]

def on_import(event, given):
    if event == "import" and given[0] == MODULE and left:
        interrupt() if CALLS == 0 else sys.settrace(on_call)

def on_call(frame, event, given):
    if frame.f_globals.get("__name__") == MODULE and left:
        left[0] -= 1
        if left[0] == 0:
            sys.settrace(None)
            interrupt()

def interrupt():
    left.clear()
    signal.raise_signal(signal.SIGINT)

def call():
    x = torch.ones(3)
    assert torch.equal(torch.compile(lambda x: (x @ x).relu() + 1, backend="dynaxla")(x), (x @ x).relu() + 1)

sys.addaudithook(on_import)
try:
    call()
except KeyboardInterrupt:
    print("interrupted")
call()
import dynaxla
assert "eager" not in dynaxla.report(), dynaxla.report()
print("right")
"""


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    with interruptible():
        yield


def _defer(*steps: Callable[[], object]) -> None:
    with defer_interrupts():
        for step in steps:
            step()


def test_an_interrupt_is_raised_at_the_end() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        _defer(interrupt, lambda: done.append(1))
    assert done
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_one_within_another_is_raised_by_the_outer_one() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        _defer(lambda: _defer(interrupt), lambda: done.append(1))
    assert done


def test_a_second_interrupt_is_raised_at_once() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        _defer(interrupt, interrupt, lambda: done.append(1))
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_alarm_is_raised_at_the_end() -> None:
    def raise_timeout(*_: object) -> None:
        raise TimeoutError

    done: list[int] = []
    before = signal.signal(signal.SIGALRM, raise_timeout)
    try:
        with pytest.raises(TimeoutError):
            _defer(lambda: signal.raise_signal(signal.SIGALRM), lambda: done.append(1))
        assert signal.getsignal(signal.SIGALRM) is raise_timeout
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done


def test_an_error_comes_with_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        _defer(interrupt, lambda: int("no number"))
    assert isinstance(raised.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_not_pythons_stay(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with defer_interrupts():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_the_work_sets_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    own: Callable[..., None] = lambda *_: None  # noqa: E731
    try:
        with defer_interrupts():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_interrupts() -> None:
    done = []

    def work() -> None:
        with defer_interrupts():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def test_what_is_made_once_is_made_whole() -> None:
    made: list[object] = []
    coming = [interrupt]

    @once
    def make() -> object:
        if coming:
            coming.pop()()
        made.append(object())
        return made[-1]

    with pytest.raises(KeyboardInterrupt):
        make()
    assert len(made) == 1
    assert make() is made[0]
    assert len(made) == 1


@pytest.mark.parametrize(
    ("module", "calls"),
    [("jaxlib.gpu_rnn", 0), ("dynaxla.graph_builder", 0), ("torch_mlir.dialects._torch_ops_gen", 100)],
)
def test_an_import_that_was_interrupted_leaves_the_backend_usable(module: str, calls: int) -> None:
    assert _run(SCRIPT, module, calls) == ["interrupted", "right"]


def test_a_device_whose_making_was_interrupted_is_usable() -> None:
    script = SCRIPT.replace("x = torch.ones(3)", "import dynaxla; x = torch.ones(3, device=dynaxla.use())")
    assert _run(script, "dynaxla.torch_api.private_device", 200) == ["interrupted", "right"]


def _run(script: str, module: str, calls: int) -> list[str]:
    command = [sys.executable, "-c", script, module, str(calls)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()
