"""Events that servers tell their observers, and how a request ends."""

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


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """A run of the model.

    Attributes:
        sizes: the requests' sizes, in elements.
        padded_rows, padded_size: the rows and the size of the batch, padding included.
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


class Observer(RequestObserver):
    """Base of observers of a batching server; its methods do nothing. See `RequestObserver` for who calls them."""

    def batch_finished(self, event: BatchFinished) -> None:
        pass


@dataclass(frozen=True, slots=True)
class GenerationFinished(RequestFinished):
    """The end of a request that was accepted.

    Attributes:
        prompt_tokens, cached_tokens, tokens: number of tokens of its prompt, of that in the kv cache before, of its answer.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One call of a program.

    Attributes:
        kind: "prefill" or "decode".
        rows, used_rows: rows of the program, and those with a request.
        tokens, padded_tokens: tokens that were asked for, and that were computed.
        run_s: seconds it took.
        slots_used: slots with a request.
        failed: whether it raised.
    """

    kind: str
    rows: int
    used_rows: int
    tokens: int
    padded_tokens: int
    run_s: float
    slots_used: int
    failed: bool = False


class EngineObserver(RequestObserver):
    """Base of observers of an engine; its methods do nothing. See `RequestObserver` for who calls them."""

    def step_finished(self, event: StepFinished) -> None:
        pass

    def slot_assigned(self, waited_s: float) -> None:
        """A request has a slot, `waited_s` seconds after its submission."""

    def first_token(self, seconds: float) -> None:
        """The first token of an answer, `seconds` after its submission."""

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` more tokens of an answer, `seconds` after the ones before."""
