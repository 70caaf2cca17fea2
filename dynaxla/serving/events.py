"""Events that every server tells its observer, and how a request ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dynaxla.errors import QueueFull, RequestRejected, ServingError


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

    @property
    def was_accepted(self) -> bool:
        return self not in (Outcome.REJECTED, Outcome.QUEUE_FULL, Outcome.NOT_SERVING)

    @classmethod
    def of_refusal(cls, error: ServingError) -> Outcome:
        """The outcome of a request that `submit` refused with this error."""
        if isinstance(error, QueueFull):
            return cls.QUEUE_FULL
        return cls.REJECTED if isinstance(error, RequestRejected) else cls.NOT_SERVING


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The end of a request.

    Attributes:
        outcome: how it ended.
        total_s: seconds since it was submitted.
    """

    outcome: Outcome
    total_s: float = 0.0


class RequestObserver:
    """Base of observers; its methods do nothing.

    They are called from the worker and from the threads that submit and cancel, and must neither raise nor block.
    """

    def request_finished(self, event: RequestFinished) -> None:
        pass
