"""Imports one of PyTorch's device-generic test files for two devices, and runs its tests in forked workers.

A test's name is that of its generic class and of its method on the device: `TestShapeOps.test_flip_dynaxla_float32`. It
runs on the CPU first, and on the device only if it passes there. A worker runs many tests in turn; one that ends or is
killed costs only the test that ran.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing as mp
import os
import signal
import sys
import time
import unittest
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from conformance.quiet import be_quiet
from dynaxla.device import registration

DEVICE = "dynaxla"
TESTS_PER_WORKER = 200
"""After these a worker ends, which frees what tests left behind."""
_POLL_S = 0.2
_DETAIL = 300

SAME, FAILS, SLOW, DIED, SKIPPED, NOT_RUN = "same", "fails", "slow", "died", "skipped", "not run"


@dataclass(frozen=True)
class Limits:
    """Of a test on one device: CPU time of the worker and of its children that have ended, and time by the clock."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Outcome:
    """What came of one test.

    Attributes:
        file: relative to the folder of tests.
        test: "" for a file that cannot be imported.
        status: SAME, FAILS, SLOW (than the limit) or DIED on the device; SKIPPED there; NOT_RUN if it does not pass on the CPU.
        detail: the error, or the reason.
        seconds: of the device's side, in CPU time of the worker and its children.
    """

    file: str
    test: str
    status: str
    detail: str = ""
    seconds: float = 0.0


class _Verdict(unittest.TestResult):
    """The result of a single test: `status` is "passes", "skipped" or "fails"."""

    def __init__(self) -> None:
        super().__init__()
        self.status, self.detail = "passes", ""

    def addError(self, test: Any, err: Any) -> None:
        self.status, self.detail = FAILS, _describe(err[1])

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        if self.status != FAILS:
            self.status, self.detail = SKIPPED, reason[:_DETAIL]

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.addSkip(test, "fails as PyTorch expects")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.status, self.detail = FAILS, "passes where PyTorch expects a failure"


def _describe(error: BaseException) -> str:
    message = " ".join(str(error).partition("To execute this test")[0].split())
    return f"{type(error).__name__}: {message}"[:_DETAIL]


def provide_old_names() -> None:
    """Gives torch's test framework the names that test files of PyTorch 2.6 import from it and that it no longer has."""
    from torch.testing._internal import (
        common_cuda,
        common_device_type,
        common_methods_invocations,
        common_mkldnn,
        common_nn,
    )

    databases = common_methods_invocations
    names = [
        (common_cuda, "tf32_is_not_fp32", lambda: False),
        (common_mkldnn, "bf32_on_and_off", lambda *precision: lambda test: test),
        (common_nn, "new_module_tests", []),  # for classes that are not device-generic
        (databases, "binary_ufuncs_and_refs", databases.binary_ufuncs),
        (databases, "skip", getattr(common_device_type, "skip", None)),
        (databases, "xfail", getattr(common_device_type, "xfail", None)),
        (databases, "skipOps", lambda case, test, ops: common_device_type.skipOps(ops)),
    ]
    for module, name, value in names:
        if not hasattr(module, name):
            setattr(module, name, value)


class TestFile:
    """An imported file. Importing it starts neither the device nor a thread, so that workers can be forked."""

    __test__ = False

    def __init__(self, folder: Path, name: str) -> None:
        """Imports the file `name` of `folder`, with its device-generic classes made for the CPU and for the device.

        Raises:
            Exception: whatever the import raises.
        """
        path = (folder / name).resolve()
        sys.path[:0] = [str(path.parent), str(folder.resolve())]
        sys.argv[:] = [str(path)]
        os.chdir(path.parent)
        torch.utils.rename_privateuse1_backend(DEVICE)
        from torch.testing._internal import common_device_type as generic

        class DynaxlaTestBase(generic.DeviceTypeTestBase):  # type: ignore[misc]
            device_type = DEVICE

            @classmethod
            def get_primary_device(cls) -> str:
                return f"{DEVICE}:0"

        if DEVICE not in generic.NATIVE_DEVICES:  # it was read before the device had its name
            generic.NATIVE_DEVICES += (DEVICE,)
        bases = [generic.CPUTestBase, DynaxlaTestBase]
        with patch.object(generic, "device_type_test_bases", bases):
            try:
                self._module: ModuleType = importlib.import_module(path.stem)
            except ImportError:
                provide_old_names()
                self._module = importlib.import_module(path.stem)
        self._own_fixtures(generic.CPUTestBase, DynaxlaTestBase)
        self._name = name
        self._bases = {"cpu": generic.CPUTestBase, DEVICE: DynaxlaTestBase}

    def _own_fixtures(self, *bases: type) -> None:
        """Moves `setUp` and `tearDown` that call `super(self.__class__, self)` to the classes made for devices.

        Test files of torch 2.6 expect them there; with today's framework such a call has no end.
        """
        made_of = {
            made: made.__bases__[-1]
            for made in vars(self._module).values()
            if isinstance(made, type) and made.__bases__[0] in bases
        }
        for name in ("setUp", "tearDown"):
            methods = {made: vars(generic).get(name) for made, generic in made_of.items()}
            for made, method in methods.items():
                if method is not None and "__class__" in method.__code__.co_names:
                    setattr(made, name, method)
                    if name in vars(made_of[made]):
                        delattr(made_of[made], name)

    @cached_property
    def tests(self) -> Mapping[str, tuple[unittest.TestCase | None, unittest.TestCase]]:
        """By name, the test on the CPU, None where it has none, and on the device."""
        on_cpu = self._find("cpu")
        return {
            name: (on_cpu.get(name.replace(f"_{DEVICE}", "_cpu")), test) for name, test in self._find(DEVICE).items()
        }

    def _find(self, device: str) -> dict[str, unittest.TestCase]:
        base, found = self._bases[device], {}
        for made in vars(self._module).values():
            if isinstance(made, type) and base in made.__bases__:
                generic_class = made.__bases__[-1].__name__
                for method in unittest.defaultTestLoader.getTestCaseNames(made):
                    found[f"{generic_class}.{method}"] = made(method)
        return found

    def run(self, names: Sequence[str], limits: Limits) -> Iterator[Outcome]:
        """Runs tests in workers."""
        done = 0
        while done < len(names):
            worker = _Worker(self, names[done : done + TESTS_PER_WORKER])
            for name in worker.names:
                done += 1
                outcome = self._follow(worker, name, limits)
                yield outcome
                if not worker.is_alive:
                    break
            worker.end()

    def _follow(self, worker: _Worker, name: str, limits: Limits) -> Outcome:
        if self.tests[name][0] is None:
            return Outcome(self._name, name, NOT_RUN, "not on the CPU")
        status, detail, _ = worker.receive(limits)
        if status != "passes":
            why = "" if status == SKIPPED else f" {detail}"
            return Outcome(self._name, name, NOT_RUN, f"on the CPU: {status}{why}")
        status, detail, seconds = worker.receive(limits)
        return Outcome(self._name, name, SAME if status == "passes" else status, detail, round(seconds, 2))


class _Worker:
    """A forked process that runs tests in turn, each on the CPU and, if it passes there, on the device."""

    def __init__(self, file: TestFile, names: Sequence[str]) -> None:
        self.names = names
        self.is_alive = True
        self._results, there = mp.Pipe(duplex=False)
        tests = [pair for name in names if (pair := file.tests[name])[0] is not None]
        self._process = mp.get_context("fork").Process(target=_work, args=(tests, there))
        self._process.start()
        there.close()
        self.receive(Limits(600.0, 6000.0))  # the device has started

    def receive(self, limits: Limits) -> tuple[str, str, float]:
        """The next result: its status, its detail, and the CPU time that it took."""
        started, began = self._cpu_s(), time.monotonic()
        while True:
            try:
                if self._results.poll(_POLL_S):
                    status, detail = self._results.recv()
                    return status, detail, self._cpu_s() - started
            except EOFError:
                self.is_alive = False
                self._process.join()
                return DIED, f"exit code {self._process.exitcode}", 0.0
            used, waited = self._cpu_s() - started, time.monotonic() - began
            if used > limits.cpu_s or waited > limits.wall_s:
                self.is_alive = False
                over = f"{limits.cpu_s:g} s of CPU time" if used > limits.cpu_s else f"{limits.wall_s:g} s"
                return SLOW, f"over {over}", used

    def _cpu_s(self) -> float:
        """CPU time of the process and of its children that have ended; 0 once it has."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0.0
        return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Kills the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self._results.close()


def _work(tests: Sequence[tuple[unittest.TestCase, unittest.TestCase]], connection: Connection) -> None:
    os.setsid()
    be_quiet()
    gc.freeze()  # a file of tests makes millions of objects, among which the collector would look for what a test leaves
    with patch.object(registration, "get_registered_device_type", return_value=None):  # TestFile has named it
        registration.use("cpu")
    connection.send(("ready", ""))
    for on_cpu, on_device in tests:
        verdict = _run(on_cpu)
        connection.send((verdict.status, verdict.detail))
        if verdict.status == "passes":
            verdict = _run(on_device)
            connection.send((verdict.status, verdict.detail))
    connection.close()


def _run(test: unittest.TestCase) -> _Verdict:
    verdict = _Verdict()
    unittest.TestSuite([test]).run(verdict)
    return verdict
