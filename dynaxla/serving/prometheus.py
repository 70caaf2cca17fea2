"""Prometheus metrics of servers and of the backend. Needs the `serve` or the `llm` extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynaxla.observe.exposition import MetricsCollector
from dynaxla.observe.recorder import Metrics
from dynaxla.serving.events import (
    BatchFinished,
    EngineObserver,
    GenerationFinished,
    Observer,
    Outcome,
    RequestFinished,
    StepFinished,
)

_BATCH_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_ENGINE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class MetricFactory:
    """Makes metrics in a registry of the caller's; nothing is registered globally.

    Args:
        registry: where the metrics are exported.
        prefix: of their names.
        seconds: upper limits of the buckets of histograms of time.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, seconds: Sequence[float]) -> None:
        self._registry, self._prefix, self._seconds = registry, prefix, seconds

    def counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"{self._prefix}_{name}", help_text, labels, registry=self._registry)

    def seconds(self, name: str, help_text: str, *labels: str) -> Histogram:
        return self.histogram(f"{name}_seconds", help_text, self._seconds, *labels)

    def histogram(self, name: str, help_text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"{self._prefix}_{name}", help_text, labels, buckets=buckets, registry=self._registry)


class RequestMetrics:
    """Counts requests by their outcomes, and how long they took: the part of an observer that servers share."""

    def __init__(self, factory: MetricFactory) -> None:
        self._requests = factory.counter("requests", "Requests by outcome", "outcome")
        for outcome in Outcome:
            self._requests.labels(outcome.value)  # so that each is exported, as 0, from the start
        self._total = factory.seconds("request", "From submission to the end of a request", "outcome")

    def request_finished(self, event: RequestFinished) -> None:
        self._requests.labels(event.outcome.value).inc()
        if event.outcome.was_accepted:
            self._total.labels(event.outcome.value).observe(event.total_s)


def watch_gauge(registry: CollectorRegistry, name: str, help_text: str, read: Callable[[], int]) -> None:
    """Exports a number that is read at every scrape."""
    Gauge(name, help_text, registry=registry).set_function(read)


class PrometheusObserver(Observer):
    """Counts requests and runs in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry, "serving", _BATCH_SECONDS)
        self._requests = RequestMetrics(make)
        self._wait = make.seconds("wait", "From submission to the run")
        self._run = make.seconds("run", "One run of the model")
        self._rows = make.histogram("batch_rows", "Requests in a run", _BATCH_ROWS)
        self._failed_runs = make.counter("failed_runs", "Runs that raised")
        self._true = make.counter("true_elements", "Elements of requests that were run")
        self._padded = make.counter("padded_elements", "Elements that were run, with padding")

    def request_finished(self, event: RequestFinished) -> None:
        self._requests.request_finished(event)

    def batch_finished(self, event: BatchFinished) -> None:
        self._run.observe(event.run_s)
        self._rows.observe(len(event.sizes))
        self._failed_runs.inc(event.failed)
        for wait_s in event.waits_s:
            self._wait.observe(wait_s)
        self._true.inc(sum(event.sizes))
        self._padded.inc(event.padded_rows * event.padded_size)


def watch_queue(registry: CollectorRegistry, depth: Callable[[], int]) -> None:
    """Exports the number of requests that wait, read at every scrape."""
    watch_gauge(registry, "serving_queue_depth", "Requests that wait", depth)


class EngineMetrics(EngineObserver):
    """Counts requests, calls of programs and tokens in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry, "llm", _ENGINE_SECONDS)
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


def watch_engine(
    registry: CollectorRegistry,
    queue_depth: Callable[[], int],
    slots_used: Callable[[], int],
    cache_bytes: Callable[[], int],
) -> None:
    """Exports how many requests wait for a slot and how many have one, and the kv cache's bytes on a device, at every scrape.

    Args:
        registry: where the metrics are exported.
        queue_depth, slots_used, cache_bytes: `lambda: engine.queue_depth` and so on.
    """
    watch_gauge(registry, "llm_queue_depth", "Requests that wait for a slot", queue_depth)
    watch_gauge(registry, "llm_slots_used", "Slots with a request", slots_used)
    watch_gauge(registry, "llm_kv_cache_bytes", "Bytes of the kv cache on each device", cache_bytes)


def watch_compiles(registry: CollectorRegistry, read_metrics: Callable[[], Metrics]) -> None:
    """Exports the backend's counters, read at every scrape: `watch_compiles(registry, dynaxla.read_metrics)`."""
    registry.register(MetricsCollector(read_metrics))
