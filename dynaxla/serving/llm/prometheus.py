"""What an engine does, as Prometheus metrics. Needs the `llm` extra."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynaxla.serving.events import Outcome
from dynaxla.serving.llm.events import Answered, Stepped

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class PrometheusObserver:
    """Counts answers, calls and tokens in a registry of the caller's; nothing is registered globally."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"llm_{name}", what, labels, registry=registry)

        def seconds(name: str, what: str, *labels: str) -> Histogram:
            return Histogram(f"llm_{name}_seconds", what, labels, buckets=_SECONDS, registry=registry)

        self._requests = counter("requests", "Requests by how they ended", "outcome")
        for outcome in Outcome:
            self._requests.labels(outcome.value)  # so that each is there, as 0, from the start
        self._total = seconds("request", "From submission to the end", "outcome")
        self._wait = seconds("wait", "From submission to a slot")
        self._first = seconds("first_token", "From submission to the first token")
        self._between = seconds("between_tokens", "Between two tokens of an answer")
        self._step = seconds("step", "One call of a program", "kind")
        self._prompt = counter("prompt_tokens", "Tokens of prompts that ended")
        self._cached = counter("cached_tokens", "Those of them that were in the cache already")
        self._tokens = counter("tokens", "Tokens of answers")
        self._wanted = counter("true_tokens", "Tokens that a program was called for", "kind")
        self._padded = counter("padded_tokens", "Tokens that were computed, with idle rows and padding", "kind")
        self._failed = counter("failed_steps", "Calls that raised", "kind")

    def answered(self, event: Answered) -> None:
        self._requests.labels(event.outcome.value).inc()
        if event.prompt_tokens:
            self._total.labels(event.outcome.value).observe(event.total_s)
            self._prompt.inc(event.prompt_tokens)
            self._cached.inc(event.cached_tokens)
            self._tokens.inc(event.tokens)

    def stepped(self, event: Stepped) -> None:
        self._step.labels(event.kind).observe(event.run_s)
        self._wanted.labels(event.kind).inc(event.tokens)
        self._padded.labels(event.kind).inc(event.padded)
        self._failed.labels(event.kind).inc(event.failed)

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._between.observe(seconds / tokens)


def watch(registry: CollectorRegistry, waiting: Callable[[], int], slots_used: Callable[[], int]) -> None:
    """Exports how many requests wait for a slot and how many have one, read at every scrape.

    Args:
        registry: where.
        waiting, slots_used: `lambda: engine.queue_depth`, `lambda: engine.slots_used`.
    """
    Gauge("llm_queue_depth", "Requests that wait for a slot", registry=registry).set_function(waiting)
    Gauge("llm_slots_used", "Slots with a request", registry=registry).set_function(slots_used)
