"""Prometheus metrics that every server has, and those of the backend. Needs the `serve` or the `llm` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dynaxla.observe.recorder import Metrics
from dynaxla.serving.events import Outcome, RequestFinished


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


def watch_compiles(registry: CollectorRegistry, read_metrics: Callable[[], Metrics]) -> None:
    """Exports the backend's counters, read at every scrape: `watch_compiles(registry, dynaxla.read_metrics)`."""
    registry.register(_CompileCollector(read_metrics))


class _CompileCollector(Collector):
    def __init__(self, read_metrics: Callable[[], Metrics]) -> None:
        self._read_metrics = read_metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._read_metrics()
        yield CounterMetricFamily("dynaxla_graphs", "Graphs captured by Dynamo", metrics.graphs)
        yield CounterMetricFamily("dynaxla_compiles", "Executables compiled", metrics.compiles)
        yield CounterMetricFamily("dynaxla_misses", "Calls of a frozen function without their program", metrics.misses)
        yield CounterMetricFamily("dynaxla_evictions", "Executables evicted", metrics.evictions)
        yield CounterMetricFamily("dynaxla_compile_seconds", "Spent in XLA's compiler", metrics.compile_s)
        yield CounterMetricFamily("dynaxla_eager_ops", "Ops that run in eager", metrics.eager_ops)
        yield CounterMetricFamily("dynaxla_exact_shapes", "Parts compiled per exact shape", len(metrics.exact_shapes))
