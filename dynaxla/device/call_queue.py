"""Calls of ops that wait for XLA's compiler: Python goes on, and they are run in order when their programs are there.

In a first pass nearly every op has a program of its own. To lower it takes Python; to compile it takes XLA as long again, which
needs neither Python nor the lock of tracing, so it is done in threads. The results of a call whose program is not there are
pending. As long as a call waits, those behind it wait as well: buffers are written and taken in the program's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from dynaxla.device.lazy_buffer import LazyBuffer, drop_traceback
from dynaxla.device.op_programs import OpProgram, OpProgramBuilder
from dynaxla.errors import ExecutionError
from dynaxla.isolation.forking import new_lock
from dynaxla.isolation.interrupts import defer_interrupts
from dynaxla.runtime.client import Buffer

MOST_WAITING = 512
"""So many calls wait at most, as they hold what they take."""


class WaitingCall:
    """A call that waits for its program, or for the calls before it.

    Attributes:
        given: what the program takes.
        shared: of the arguments whose memory it takes those that others have, too: it gets copies of them.
        is_done: whether it was run.
    """

    __slots__ = ("_finish", "given", "is_done", "program", "results", "shared")

    def __init__(
        self, finish: Callable[[WaitingCall], None], program: OpProgram, given: list[Any], shared: Sequence[int]
    ) -> None:
        self._finish = finish
        self.program = program
        self.given = given
        self.shared = shared
        self.results: list[ref[LazyBuffer]] = []
        self.is_done = False

    def finish(self) -> None:
        self._finish(self)


class CallQueue:
    """Runs calls in their order. Safe from several threads.

    Nothing that holds the lock waits for the lock of tracing: what is compiled here was lowered before.

    Args:
        copy: copies a buffer.

    Attributes:
        calls: those that wait.
    """

    def __init__(self, builder: OpProgramBuilder, copy: Callable[[Buffer], Buffer]) -> None:
        self._builder = builder
        self._copy = copy
        self.calls: deque[WaitingCall] = deque()
        self._lock = new_lock()

    def must_wait(self, program: OpProgram) -> bool:
        """Whether a call of a program has to wait; runs the calls before it whose programs are there."""
        while self.calls and (self.calls[0].program.is_ready or len(self.calls) > MOST_WAITING):
            self.calls[0].finish()
        return bool(self.calls) or program.compiling is not None

    def add(self, program: OpProgram, given: list[Any], shared: Sequence[int]) -> list[LazyBuffer]:
        """The results of a call, which is run later.

        Args:
            given: what the program takes; what calls before it give may be pending.
            shared: see `WaitingCall`.
        """
        call = WaitingCall(self.finish, program, given, shared)
        made = [LazyBuffer(call, 0, result) for result in range(program.outline.result_count)]
        call.results = [ref(each) for each in made]
        self.calls.append(call)
        return made

    def finish(self, last: WaitingCall | None = None) -> None:
        """Runs the calls up to one, or all. What fails is raised where results are read."""
        while self.calls and (last is None or not last.is_done):
            with self._lock:
                if self.calls and (last is None or not last.is_done):
                    self._run_first()

    def _run_first(self) -> None:
        call = self.calls[0]
        wanted = [each() for each in call.results]
        is_wanted = any(each is not None for each in wanted)
        if is_wanted:
            call.program.settle()
        with defer_interrupts():  # the run takes the memory of tensors, whose new values it gives
            self._run(call, wanted if is_wanted else [])
            self.calls.popleft()

    def _run(self, call: WaitingCall, wanted: Sequence[LazyBuffer | None]) -> None:
        if wanted:
            outcomes: Sequence[Any]
            try:
                outcomes = self._results(call)
            except ExecutionError as error:
                outcomes = [drop_traceback(error)] * len(wanted)
            for pending, outcome in zip(wanted, outcomes, strict=True):
                if pending is not None:
                    pending.settle(outcome, self._builder.client.mesh_devices)
        call.is_done, call.given = True, []

    def _results(self, call: WaitingCall) -> Sequence[Buffer]:
        given = [each.buffer() if type(each) is LazyBuffer else each for each in call.given]
        for argument in call.shared:
            given[argument] = self._copy(given[argument])
        executable = call.program.settle()
        return executable.run(given) if executable is not None else self._run_on_host(call.program, given)

    def _run_on_host(self, program: OpProgram, given: Sequence[Buffer]) -> Sequence[Buffer]:
        assert program.compiling is not None
        try:
            return self._builder.run_on_host(program.compiling.traced, given)
        except Exception as error:  # the border of a call, see partition/error_boundary.py
            raise ExecutionError(f"{type(error).__name__}: {error}") from error
