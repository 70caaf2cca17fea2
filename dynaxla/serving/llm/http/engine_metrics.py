"""What an engine does, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynaxla.serving.events import Outcome
from dynaxla.serving.llm.events import Answered, Stepped

_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_ACCEPTED = (Outcome.OK, Outcome.FAILED, Outcome.EXPIRED, Outcome.CANCELLED, Outcome.ABANDONED)


class EngineMetrics:
    """An engine's observer: counts in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, says: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(name, says, labels, buckets=buckets, registry=registry)

        def counter(name: str, says: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, says, labels, registry=registry)

        self._requests = counter("serving_requests", "Generations by how they ended", ("outcome",))
        for outcome in Outcome:
            self._requests.labels(outcome.value)  # so that each is there, as 0, from the start
        self._total = histogram("serving_request_seconds", "From submission to the end", _LONG_S, ("outcome",))
        self._wait = histogram("serving_wait_seconds", "From submission to a slot", _LONG_S)
        self._first = histogram("serving_first_token_seconds", "From submission to the first token", _LONG_S)
        self._next = histogram("serving_token_seconds", "From token to token", _SHORT_S)
        self._run = histogram("serving_run_seconds", "One call of a program", _SHORT_S, ("kind",))
        self._failed = counter("serving_failed_runs", "Calls that raised")
        self._tokens = counter("serving_tokens", "Tokens of answers")
        self._prompt = counter("serving_prompt_tokens", "Tokens of prompts")
        self._cached = counter("serving_cached_tokens", "Tokens of prompts that were in the cache")
        self._true = counter("serving_true_elements", "Tokens that were wanted of programs", ("kind",))
        self._padded = counter("serving_padded_elements", "Tokens that programs computed", ("kind",))

    def answered(self, event: Answered) -> None:
        self._requests.labels(event.outcome.value).inc()
        if event.outcome in _ACCEPTED:
            self._total.labels(event.outcome.value).observe(event.total_s)
            self._prompt.inc(event.prompt_tokens)
            self._cached.inc(event.cached_tokens)
            self._tokens.inc(event.tokens)

    def stepped(self, event: Stepped) -> None:
        self._run.labels(event.kind).observe(event.run_s)
        self._failed.inc(event.failed)
        self._true.labels(event.kind).inc(event.tokens)
        self._padded.labels(event.kind).inc(event.padded)

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._next.observe(seconds / tokens)


def watch_slots(registry: CollectorRegistry, used: Callable[[], int]) -> None:
    """Exports the number of slots with a request, read at every scrape."""
    Gauge("serving_slots_used", "Slots with a request", registry=registry).set_function(used)


def count_outcomes(registry: CollectorRegistry) -> str:
    """How every generation ended, in a line for a log."""
    counts = {each: registry.get_sample_value("serving_requests_total", {"outcome": each}) or 0.0 for each in Outcome}
    return " ".join(f"{outcome}={count:.0f}" for outcome, count in counts.items())
