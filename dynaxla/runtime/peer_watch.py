"""Whether the other processes run the same programs in the same order: asked once per program, and where a run does not end.

Every process says in a store which program it waits with, and for whom. Two that wait for each other with different programs
would wait for ever: both raise.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from dynaxla.errors import DistributedError, ProcessLost, ProgramsDiffer, ValuesDiffer
from dynaxla.isolation.forking import new_lock
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.peer_signals import LEFT, Heartbeats, RunOrder
from dynaxla.runtime.process_set import ProcessSet

SLOW_S = 2.0
"""A run that has not ended after so long is looked into, and again after as long."""

TICK_S = 0.5
"""So often a process tells that it is alive, and hears the others."""

LONGEST_END_S = 30.0
"""So long a process waits for the others at its end."""

_SHORTEST_END_S = 4 * TICK_S
"""After a failure: in which others that are alive say so more than once."""

_POLL_S = 0.01

logger = logging.getLogger("dynaxla")


@dataclass(frozen=True, slots=True)
class JointProgram:
    """A program that several processes run together.

    Attributes:
        digest: of its text: the same in all of them.
        what: names it in errors.
        ranks: of the processes.
    """

    digest: str
    what: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a process waits with.

    Attributes:
        count: its runs of the program, this one included.
    """

    digest: str
    what: str
    ranks: tuple[int, ...]
    count: int

    @classmethod
    def parse(cls, text: bytes) -> _Wait | None:
        found = json.loads(text)
        return cls(**{**found, "ranks": tuple(found["ranks"])}) if found else None


@dataclass(slots=True)
class _Run:
    wait: _Wait
    result: Buffer
    began: float
    suspected: frozenset[int] = frozenset()


class PeerWatch:
    """Watches the runs of joint programs. Safe from several threads.

    Args:
        processes: is told of what is found.
    """

    def __init__(self, processes: ProcessSet) -> None:
        self._processes = processes
        self._store = processes.store
        self._timeout_s = processes.timeout_s
        self._over = threading.Event()
        self._meetings = 0
        self._agreed: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._orders: dict[tuple[str, tuple[int, ...]], RunOrder] = {}
        self._runs: deque[_Run] = deque()
        self._lock = new_lock()
        processes.find_reason = partial(self._quietly, partial(self._check_left, "a program", range(processes.size)))
        self._thread = threading.Thread(target=self._watch, name="dynaxla peers", daemon=True)
        self._thread.start()
        processes.watch = self
        atexit.register(self.leave)

    def begin(self, program: JointProgram) -> None:
        """Is called before each run. At the first one of a program, waits until all its processes have it.

        Raises:
            ProgramsDiffer: another process waits with another program.
            ProcessLost: another process is gone.
            DistributedError: the others did not come in time.
        """
        self._processes.check()
        if program.digest not in self._agreed:
            self._agree(program)
            self._agreed.add(program.digest)

    def note(self, program: JointProgram, result: Buffer) -> None:
        """Is called after each run was submitted, with one of its results."""
        with self._lock:
            self._counts[program.digest] += 1
            self._add("programs", program.ranks, program.digest)
            count = self._counts[program.digest]
            wait = _Wait(program.digest, program.what, program.ranks, count)
            while self._runs and _is_done(self._runs[0].result):
                self._runs.popleft()
            self._runs.append(_Run(wait, result, time.monotonic()))

    def note_sizes(self, program: JointProgram, sizes: tuple[int, ...]) -> None:
        """Adds the true sizes of a run to what the processes compare."""
        with self._lock:
            self._add("programs", program.ranks, repr(sizes))

    def note_value(self, ranks: tuple[int, ...], checksum: int) -> None:
        """Adds a value that each of these processes has put on a mesh to what they compare."""
        with self._lock:
            self._add("values", ranks, str(checksum))

    def _add(self, what: str, ranks: tuple[int, ...], text: str) -> None:
        self._orders.setdefault((what, ranks), RunOrder()).add(text)

    def meet(self) -> None:
        """Waits until all processes have called it as often as this one.

        Raises:
            ProcessLost: a process has ended, or did not come in time.
        """
        self._meetings += 1
        name, until = f"met/{self._meetings}", time.monotonic() + self._timeout_s
        self._ask(lambda: self._store.set(f"{name}/{self._processes.rank}", "1"))
        for rank in range(self._processes.size):
            while True:
                has_left = self._ask(partial(self._find_left, [rank]))
                if self._ask(partial(self._store.check, [f"{name}/{rank}"])):
                    break
                self._processes.check()
                if has_left or time.monotonic() > until:
                    raise ProcessLost((rank,), f"it did not come where all meet, within {self._timeout_s:g} s")
                time.sleep(10 * _POLL_S)

    def leave(self) -> None:
        """Tells the others that this process ends, and waits a while for them: the service ends with the process that has it,
        and JAX's clients that are still connected end theirs. So the one that has it waits as long as another is alive."""
        self._over.set()
        self._thread.join()  # else it may say that this process is alive after it has left
        before, has_service = self._processes.failure, self._processes.service is not None
        try:
            self._store.set(f"alive/{self._processes.rank}", LEFT.decode())
            if before is None:
                self._wait_for_ends(self._find_left, LONGEST_END_S)
                self._compare_orders()
            if has_service:  # JAX ends a process whose client is connected when the service ends
                self._wait_for_ends(self._find_gone, LONGEST_END_S if before is None else _SHORTEST_END_S)
                time.sleep(TICK_S)
            self._store.set(f"gone/{self._processes.rank}", "1")
            self._processes.disconnect()
        except RuntimeError as error:
            logger.warning("the processes did not end together: %s", error)
        if before is None and isinstance(self._processes.failure, ProgramsDiffer | ValuesDiffer):
            logger.error("what was computed is wrong: %s", self._processes.failure)

    def _wait_for_ends(self, find_ended: Callable[[Sequence[int]], set[int]], patience_s: float) -> None:
        """Waits until all others have ended, or nothing was heard of them for so long.

        Raises:
            ProcessLost: they have not ended.
        """
        others, heard = [rank for rank in range(self._processes.size) if rank != self._processes.rank], list[bytes]()
        began = time.monotonic()
        until = began + patience_s
        while staying := sorted(set(others) - find_ended(others)):
            beats = [self._store.get(f"alive/{rank}") for rank in staying if self._store.check([f"alive/{rank}"])]
            may_last = self._processes.failure is None or time.monotonic() - began < LONGEST_END_S
            if self._processes.service is not None and beats != heard and may_last:
                heard, until = beats, time.monotonic() + patience_s
            if time.monotonic() > until:
                raise ProcessLost(tuple(staying), f"it has not ended {patience_s:g} s after this process")
            time.sleep(_POLL_S)

    def _find_gone(self, ranks: Sequence[int]) -> set[int]:
        """Those that are not connected any more."""
        return {rank for rank in ranks if self._store.check([f"gone/{rank}"])}

    def _find_left(self, ranks: Sequence[int]) -> set[int]:
        told = [rank for rank in ranks if self._store.check([f"alive/{rank}"])]
        return {rank for rank in told if self._store.get(f"alive/{rank}") == LEFT}

    def _check_left(self, what: str, ranks: Sequence[int]) -> None:
        """Looks whether one of these processes has ended.

        Raises:
            ProcessLost: a process that a run waits for has ended.
        """
        left = self._ask(lambda: self._find_left(ranks))
        if left:
            error = ProcessLost(tuple(sorted(left)), f"it has ended, and {what} waits for it")
            self._processes.fail(error)
            raise error

    def _agree(self, program: JointProgram) -> None:
        me = self._processes.rank
        others = [rank for rank in program.ranks if rank != me]
        wait = _Wait(program.digest, program.what, program.ranks, self._counts[program.digest] + 1)
        self._ask(lambda: self._store.set(f"ready/{program.digest}/{me}", "1"))
        keys = [f"ready/{program.digest}/{rank}" for rank in others]
        started = asked = time.monotonic()
        told = False
        while keys and not self._ask(lambda: self._store.check(keys)):
            self._processes.check()
            now = time.monotonic()
            if now - asked > 10 * _POLL_S:
                if not told:
                    self._say(wait)
                    told = True
                asked = now
                self._compare(wait)
            if now - started > self._timeout_s:
                self._give_up(program, keys)
            time.sleep(_POLL_S)
        if told:
            self._say(None)

    def _give_up(self, program: JointProgram, keys: Sequence[str]) -> None:
        missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
        error = ProcessLost(tuple(map(int, missing)), f"did not come to {program.what} within {self._timeout_s:g} s")
        self._processes.fail(error)
        raise error

    def _say(self, wait: _Wait | None) -> None:
        text = json.dumps(None if wait is None else asdict(wait))
        self._ask(lambda: self._store.set(f"waits/{self._processes.rank}", text))

    def _ask(self, ask: Any) -> Any:
        """Of the store, which ends with the process that has it."""
        try:
            return ask()
        except RuntimeError as error:
            self._processes.check()
            raise ProcessLost((0,), f"the store of the processes, which it has, is gone: {error}") from error

    def _waits_of(self, rank: int) -> _Wait | None:
        key = f"waits/{rank}"
        return _Wait.parse(self._store.get(key)) if self._store.check([key]) else None

    def _conflict(self, mine: _Wait) -> dict[int, _Wait]:
        """Processes that wait for this one with a run that this one has not begun, while it waits for them."""
        me, found = self._processes.rank, {}
        for rank in mine.ranks:
            theirs = self._waits_of(rank) if rank != me else None
            if theirs is None or me not in theirs.ranks or self._counts[theirs.digest] >= theirs.count:
                continue
            if (theirs.digest, theirs.count) != (mine.digest, mine.count):
                found[rank] = theirs
        return found

    def _compare(self, mine: _Wait) -> None:
        """
        Raises:
            ProgramsDiffer: another process waits for this one with another program.
        """
        self._check_left(mine.what, mine.ranks)
        for rank, theirs in self._ask(lambda: self._conflict(mine)).items():
            error = ProgramsDiffer(self._processes.rank, mine.what, rank, theirs.what)
            self._say_failure(error)
            raise error

    def _say_failure(self, error: DistributedError) -> None:
        self._processes.fail(error)
        self._ask(lambda: self._store.set("failure", error.explanation))

    def _watch(self) -> None:
        """In a thread of its own: tells the others that this process is alive, hears them, and looks into slow runs."""
        beats, said = Heartbeats(self._processes), False
        while self._processes.failure is None and not self._over.is_set():
            self._quietly(partial(self._ask, beats.beat))
            self._quietly(self._hear_failure)
            self._quietly(self._compare_orders)
            with self._lock:
                while self._runs and _is_done(self._runs[0].result):
                    self._runs.popleft()
                run = self._runs[0] if self._runs else None
            if run is None and said:
                self._quietly(lambda: self._say(None))
                said = False
            elif run is not None and time.monotonic() - run.began > SLOW_S:
                self._quietly(partial(self._look_into, run))
                said = True
            self._over.wait(TICK_S)

    def _compare_orders(self) -> None:
        """With the next process of each set, so that all are compared."""
        with self._lock:
            orders = list(self._orders.items())
        for (what, ranks), order in orders:
            name, me = f"{what}/{'-'.join(map(str, ranks))}", self._processes.rank
            with self._lock:
                news = order.take_news()
            if news is not None:
                self._ask(partial(self._store.set, f"order/{name}/{me}", news))
            other = ranks[(ranks.index(me) + 1) % len(ranks)]
            key = f"order/{name}/{other}"
            if other == me or not self._ask(partial(self._store.check, [key])):
                continue
            told = self._ask(partial(self._store.get, key))
            with self._lock:
                count = order.differs(told)
            if count is not None:
                self._say_failure((ProgramsDiffer if what == "programs" else ValuesDiffer).among(me, other, count))

    def _quietly(self, work: Any) -> None:
        try:
            work()
        except DistributedError as error:
            self._processes.fail(error)

    def _hear_failure(self) -> None:
        if self._ask(lambda: self._store.check(["failure"])):
            text = self._ask(lambda: self._store.get("failure")).decode()
            lost = re.match(r"rank (\d+) is lost: (.*)", text)
            said = DistributedError(f"another process said: {text}", "all processes run the same programs")
            self._processes.fail(ProcessLost((int(lost[1]),), lost[2]) if lost else said)

    def _look_into(self, run: _Run) -> None:
        self._say(run.wait)
        self._check_left(run.wait.what, run.wait.ranks)
        conflicts = self._ask(lambda: self._conflict(run.wait))
        for rank in run.suspected & conflicts.keys():  # seen twice: the other one is not just about to begin
            self._say_failure(ProgramsDiffer(self._processes.rank, run.wait.what, rank, conflicts[rank].what))
        run.suspected = frozenset(conflicts)
        if time.monotonic() - run.began > self._timeout_s:
            others = tuple(rank for rank in run.wait.ranks if rank != self._processes.rank)
            self._processes.fail(ProcessLost(others, f"did not come to {run.wait.what} within {self._timeout_s:g} s"))


def _is_done(buffer: Buffer) -> bool:
    return bool(buffer.is_deleted() or buffer.is_ready())
