"""What an engine tells an observer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dynaxla.serving.events import Outcome


@dataclass(frozen=True, slots=True)
class Answered:
    """A request's end.

    Attributes:
        outcome: how it ended; of a request that was not accepted, why.
        total_s: seconds since it was submitted.
        prompt_tokens, cached_tokens, tokens: of its prompt, of that in the cache before, of its answer.
    """

    outcome: Outcome
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stepped:
    """One call of a program.

    Attributes:
        kind: "prefill" or "decode".
        rows, used: rows of the program, and those with a request.
        tokens, padded: tokens that were wanted, and that were computed.
        run_s: seconds it took.
        slots_used: slots with a request.
        failed: whether it raised.
    """

    kind: str
    rows: int
    used: int
    tokens: int
    padded: int
    run_s: float
    slots_used: int
    failed: bool = False


class Observer(Protocol):
    """Called from the worker and from the threads that submit; must neither raise nor block."""

    def answered(self, event: Answered) -> None: ...

    def stepped(self, event: Stepped) -> None: ...

    def waited(self, seconds: float) -> None:
        """From submission to a slot."""

    def first_token(self, seconds: float) -> None:
        """From submission to the first token."""

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """Since the tokens before, for so many."""


class Silent:
    """Observes nothing."""

    def answered(self, event: Answered) -> None:
        pass

    def stepped(self, event: Stepped) -> None:
        pass

    def waited(self, seconds: float) -> None:
        pass

    def first_token(self, seconds: float) -> None:
        pass

    def next_tokens(self, seconds: float, tokens: int) -> None:
        pass
