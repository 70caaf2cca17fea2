"""What a server tells an observer: every run, and every request's end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """How a request ended. Every request ends once; the last three were never accepted."""

    OK = "ok"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"  # accepted, and the server closed before it ran
    REJECTED = "rejected"
    QUEUE_FULL = "queue_full"
    NOT_SERVING = "not_serving"


@dataclass(frozen=True, slots=True)
class Answered:
    """A request's end.

    Attributes:
        outcome: how it ended.
        total_s: seconds since it was submitted.
    """

    outcome: Outcome
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of the model.

    Attributes:
        sizes: the requests' sizes, in elements.
        padded_rows, padded_size: what rows and sizes were padded to.
        waits_s: how long each request had waited, in seconds.
        run_s: how long the run took, in seconds.
        failed: whether it raised.
    """

    sizes: tuple[int, ...]
    padded_rows: int
    padded_size: int
    waits_s: tuple[float, ...]
    run_s: float
    failed: bool


class Observer(Protocol):
    """Called from the worker and from the threads that submit and cancel; must neither raise nor block."""

    def answered(self, event: Answered) -> None: ...

    def ran(self, event: Ran) -> None: ...


class Silent:
    """Observes nothing."""

    def answered(self, event: Answered) -> None:
        pass

    def ran(self, event: Ran) -> None:
        pass
