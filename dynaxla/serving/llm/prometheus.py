"""Prometheus metrics of a language model's engine. Needs the `llm` extra."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from dynaxla.serving.events import RequestFinished
from dynaxla.serving.llm.events import EngineObserver, GenerationFinished, StepFinished
from dynaxla.serving.prometheus import MetricFactory, RequestMetrics, watch_gauge

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EngineMetrics(EngineObserver):
    """Counts requests, calls of programs and tokens in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry, "llm", _SECONDS)
        self._requests = RequestMetrics(make)
        self._wait = make.seconds("wait", "From submission to a slot")
        self._first = make.seconds("first_token", "From submission to the first token")
        self._between = make.seconds("between_tokens", "Between two tokens of an answer")
        self._step = make.seconds("step", "One call of a program", "kind")
        self._prompt = make.counter("prompt_tokens", "Tokens of prompts of finished requests")
        self._cached = make.counter("cached_tokens", "Those of them that were in the kv cache already")
        self._tokens = make.counter("tokens", "Tokens of answers")
        self._true = make.counter("true_tokens", "Tokens that a program was called for", "kind")
        self._padded = make.counter("padded_tokens", "Tokens that were computed, with idle rows and padding", "kind")
        self._failed = make.counter("failed_steps", "Calls that raised", "kind")

    def request_finished(self, event: RequestFinished) -> None:
        self._requests.request_finished(event)
        if isinstance(event, GenerationFinished):
            self._prompt.inc(event.prompt_tokens)
            self._cached.inc(event.cached_tokens)
            self._tokens.inc(event.tokens)

    def step_finished(self, event: StepFinished) -> None:
        self._step.labels(event.kind).observe(event.run_s)
        self._true.labels(event.kind).inc(event.tokens)
        self._padded.labels(event.kind).inc(event.padded_tokens)
        self._failed.labels(event.kind).inc(event.failed)

    def slot_assigned(self, waited_s: float) -> None:
        self._wait.observe(waited_s)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._between.observe(seconds / tokens)


def watch_engine(registry: CollectorRegistry, queue_depth: Callable[[], int], slots_used: Callable[[], int]) -> None:
    """Exports how many requests wait for a slot and how many have one, read at every scrape.

    Args:
        registry: where the metrics are exported.
        queue_depth, slots_used: `lambda: engine.queue_depth`, `lambda: engine.slots_used`.
    """
    watch_gauge(registry, "llm_queue_depth", "Requests that wait for a slot", queue_depth)
    watch_gauge(registry, "llm_slots_used", "Slots with a request", slots_used)
