"""A native compiler that aborts, hangs or eats memory harms nobody but its own child process."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dynaxla import backend
from dynaxla.diagnostics import ReasonId
from dynaxla.errors import (
    LoweringCrashed,
    LoweringError,
    LoweringFailed,
    LoweringOutOfMemory,
    LoweringTimeout,
    LoweringUnavailable,
)
from dynaxla.isolation import children
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.runtime_state import RuntimeState
from tests.killed_children import killing
from tests.observe.test_dump import TANH, UNKNOWN

VERSION = "1.9.0"
LIMITS = Limits(60.0, 8 << 30)
GOOD, REJECTED = TANH.encode(), UNKNOWN.encode()


@pytest.fixture
def worker() -> Iterator[LoweringWorker]:
    made = LoweringWorker(inject_faults=True)
    yield made
    made.child.close()


def _child_pid(worker: LoweringWorker) -> int:
    assert worker.child.pid is not None
    return worker.child.pid


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _in_fork(check: Callable[[], None]) -> None:
    """Runs a check in a forked copy of this process, and fails if it fails or hangs there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            check()
            status = 0
        finally:  # never return into pytest's copy
            if status:
                traceback.print_exc(file=sys.__stderr__)
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the forked process hangs")


def test_one_child_serves_many_modules(worker: LoweringWorker) -> None:
    first = worker.lower(GOOD, VERSION, LIMITS)
    assert first.startswith(b"ML\xefR")
    pid = _child_pid(worker)
    assert worker.lower(GOOD, VERSION, LIMITS) == first
    assert _child_pid(worker) == pid
    assert pid != os.getpid()


@pytest.mark.parametrize(
    ("fault", "timeout_s", "kind"),
    [
        ("abort", 60.0, LoweringCrashed),
        ("sleep", 0.3, LoweringTimeout),
        ("allocate", 60.0, LoweringOutOfMemory),
    ],
)
def test_a_fault_ends_the_child_and_the_next_module_gets_a_new_one(
    fault: str, timeout_s: float, kind: type[LoweringError], worker: LoweringWorker
) -> None:
    expected = worker.lower(GOOD, VERSION, LIMITS)
    before = _child_pid(worker)
    with pytest.raises(kind) as caught:
        worker.lower(GOOD, f"fault:{fault}", Limits(timeout_s, 8 << 30))
    assert not _is_alive(before), "the child was not reaped"
    if isinstance(caught.value, LoweringCrashed):
        assert caught.value.exit_status == -signal.SIGABRT
    assert worker.lower(GOOD, VERSION, LIMITS) == expected
    assert _child_pid(worker) != before


def test_the_time_limit(worker: LoweringWorker) -> None:
    started = time.monotonic()
    with pytest.raises(LoweringTimeout, match=r"0\.3 s"):
        worker.lower(GOOD, "fault:sleep", Limits(0.3, 8 << 30))
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("memory_bytes", [1 << 20, 64 << 20], ids=["1 MiB", "64 MiB"])
def test_the_memory_limit(memory_bytes: int) -> None:
    """Too little even for loading torch-mlir: the dynamic linker says so in words of its own."""
    worker = LoweringWorker()
    with pytest.raises(LoweringOutOfMemory, match="GiB"):
        worker.lower(GOOD, VERSION, Limits(60.0, memory_bytes))
    worker.child.close()


@pytest.mark.parametrize(
    ("module", "stage"), [(REJECTED, "torch backend"), (b"not a module", "parse"), (b"\xff\x00", "parse")]
)
def test_a_rejected_module_leaves_the_child_alive(module: bytes, stage: str, worker: LoweringWorker) -> None:
    expected = worker.lower(GOOD, VERSION, LIMITS)
    pid = _child_pid(worker)
    with pytest.raises(LoweringFailed) as caught:
        worker.lower(module, VERSION, LIMITS)
    assert caught.value.stage == stage
    if module == REJECTED:
        assert "torch.pkg.op" in caught.value.diagnostics
    assert worker.lower(GOOD, VERSION, LIMITS) == expected
    assert _child_pid(worker) == pid


def test_a_crash_is_not_blamed_on_what_an_earlier_module_printed(worker: LoweringWorker) -> None:
    with pytest.raises(LoweringFailed):
        worker.lower(GOOD, "not a version", LIMITS)  # MLIR complains on the child's stderr
    with pytest.raises(LoweringCrashed) as caught:
        worker.lower(GOOD, "fault:abort", LIMITS)
    assert "Target version" not in caught.value.stderr_tail


def test_a_child_that_cannot_start_says_so_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enum.py").write_text("raise RuntimeError('not the module you want')")
    worker = LoweringWorker()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with pytest.raises(LoweringUnavailable, match="not the module you want"):
            worker.lower(GOOD, VERSION, LIMITS)
    assert worker.lower(GOOD, VERSION, LIMITS)
    worker.child.close()


def test_a_child_that_does_not_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = LoweringWorker()
    with monkeypatch.context() as patch:
        patch.setattr(children, "_START_S", 0.0)
        with pytest.raises(LoweringUnavailable, match="longer than 0 s to start"):
            worker.lower(GOOD, VERSION, LIMITS)
        assert worker.child.pid is None
    assert worker.lower(GOOD, VERSION, LIMITS)
    worker.child.close()


def test_no_op_is_blamed_where_the_children_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    (tmp_path / "enum.py").write_text("raise RuntimeError('not the module you want')")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where nothing is known of other tests' failures
    shared = RuntimeState(recorder=recorder)
    monkeypatch.setattr(backend, "process", lambda: shared)
    monkeypatch.syspath_prepend(tmp_path)
    x = torch.randn(3)
    before = len(recorder.snapshot().fallbacks)
    assert torch.equal(torch.compile(lambda x: torch.relu(x) * 2, backend="dynaxla")(x), torch.relu(x) * 2)
    reasons = recorder.snapshot().fallbacks[before:]
    assert reasons
    assert all(ReasonId.LOWERING_UNAVAILABLE.value in reason for reason in reasons)
    assert shared.choice.failures.empty


def test_a_child_killed_between_calls_is_replaced(worker: LoweringWorker) -> None:
    expected = worker.lower(GOOD, VERSION, LIMITS)
    killed = _child_pid(worker)
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert worker.lower(GOOD, VERSION, LIMITS) == expected
    assert _child_pid(worker) != killed
    assert not _is_alive(killed)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_whose_child_is_killed_is_asked_again(
    end: signal.Signals, worker: LoweringWorker, caplog: pytest.LogCaptureFixture
) -> None:
    expected = worker.lower(GOOD, VERSION, LIMITS)
    pid = _child_pid(worker)
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, lambda: (os.kill(pid, end), os.kill(pid, signal.SIGCONT)))
    killer.start()
    assert worker.lower(GOOD, VERSION, LIMITS) == expected
    killer.join()
    assert _child_pid(worker) != pid
    assert f"ended by {end.name}; its request is asked again" in caplog.text


def test_the_system_ends_a_child_first(worker: LoweringWorker) -> None:
    worker.lower(GOOD, VERSION, LIMITS)
    assert Path(f"/proc/{_child_pid(worker)}/oom_score_adj").read_text().strip() == "1000"


def test_a_call_whose_children_are_killed_is_not_to_blame(worker: LoweringWorker) -> None:
    """As a crash is, which no later process tries again: the system may be short of memory now."""
    expected = worker.lower(GOOD, VERSION, LIMITS)
    with killing(lambda: worker.child.pid), pytest.raises(LoweringUnavailable, match="ended by SIGKILL"):
        worker.lower(GOOD, "fault:sleep", LIMITS)
    assert worker.lower(GOOD, VERSION, LIMITS) == expected


@pytest.mark.parametrize(
    ("refusing", "error"),
    [
        ("subprocess.Popen", BlockingIOError(errno.EAGAIN, "no more processes")),
        ("tempfile.TemporaryFile", FileNotFoundError(errno.ENOENT, "no folder")),
        ("dynaxla.isolation.children.Pipe", OSError(errno.EMFILE, "no more files")),
    ],
)
def test_where_no_child_can_be_started(
    refusing: str, error: OSError, worker: LoweringWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as short:
        short.setattr(refusing, refuse)
        worker.child.start()  # nothing needs it yet
        with pytest.raises(LoweringUnavailable, match=f"cannot be started: .*{error.strerror}"):
            worker.lower(GOOD, VERSION, LIMITS)
    assert worker.lower(GOOD, VERSION, LIMITS)


def test_several_threads_at_once(worker: LoweringWorker) -> None:
    expected = worker.lower(GOOD, VERSION, LIMITS)
    results: list[bytes] = []
    faults: list[type[Exception]] = []

    def call(index: int) -> None:
        for _ in range(5):
            try:
                if index == 0:
                    worker.lower(GOOD, "fault:abort", LIMITS)
                results.append(worker.lower(GOOD if index > 1 else REJECTED, VERSION, LIMITS))
            except LoweringError as error:
                faults.append(type(error))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 20
    assert sorted(kind.__name__ for kind in faults) == ["LoweringCrashed"] * 5 + ["LoweringFailed"] * 5


def test_after_a_fork_each_process_has_its_own_child(worker: LoweringWorker) -> None:
    expected = worker.lower(GOOD, VERSION, LIMITS)
    pid = _child_pid(worker)

    def check() -> None:
        assert worker.lower(GOOD, VERSION, LIMITS) == expected
        assert _child_pid(worker) != pid
        assert _is_alive(pid), "the fork ended its parent's child"
        worker.child.close()

    _in_fork(check)
    assert worker.lower(GOOD, VERSION, LIMITS) == expected
    assert _child_pid(worker) == pid


def test_a_fork_that_only_closes_leaves_the_parents_child_alone(worker: LoweringWorker) -> None:
    expected = worker.lower(GOOD, VERSION, LIMITS)
    pid = _child_pid(worker)
    _in_fork(worker.child.close)
    assert worker.lower(GOOD, VERSION, LIMITS) == expected
    assert _child_pid(worker) == pid


def test_a_fork_while_another_thread_lowers(worker: LoweringWorker) -> None:
    """The lock that the other thread holds is not held by anyone in the forked process."""
    expected = worker.lower(GOOD, VERSION, LIMITS)
    failures: list[Exception] = []

    def hang() -> None:
        try:
            worker.lower(GOOD, "fault:sleep", Limits(3.0, 8 << 30))
        except LoweringError as error:
            failures.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    while not worker.child.busy:
        time.sleep(0.01)
    time.sleep(0.1)

    def check() -> None:
        assert worker.lower(GOOD, VERSION, LIMITS) == expected
        worker.child.close()

    _in_fork(check)
    thread.join()
    assert [type(error) for error in failures] == [LoweringTimeout]


def test_close_ends_the_child_and_can_be_repeated() -> None:
    worker = LoweringWorker()
    worker.child.close()
    expected = worker.lower(GOOD, VERSION, LIMITS)
    pid = _child_pid(worker)
    worker.child.close()
    worker.child.close()
    assert not _is_alive(pid)
    assert worker.lower(GOOD, VERSION, LIMITS) == expected, "a closed worker starts again when asked"
    worker.child.close()


def test_a_worker_nobody_holds_ends_its_child() -> None:
    worker = LoweringWorker()
    worker.lower(GOOD, VERSION, LIMITS)
    pid = _child_pid(worker)
    del worker
    assert not _is_alive(pid)


def test_faults_are_only_injected_when_asked() -> None:
    worker = LoweringWorker()
    with pytest.raises(LoweringFailed) as caught:
        worker.lower(GOOD, "fault:abort", LIMITS)
    assert caught.value.stage == "serialize"
    worker.child.close()
