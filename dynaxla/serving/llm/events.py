"""Events that a language model's engine tells its observer."""

from __future__ import annotations

from dataclasses import dataclass

from dynaxla.serving.events import RequestFinished, RequestObserver


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
