"""What a server does, as Prometheus metrics. Needs the `serve` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dynaxla.observe.recorder import Metrics
from dynaxla.serving.events import Answered, Outcome, Ran

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class PrometheusObserver:
    """Counts answers and runs in a registry of the caller's; nothing is registered globally."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("serving_requests", "Requests by how they ended", ["outcome"], registry=registry)
        for outcome in Outcome:
            self._requests.labels(outcome.value)  # so that each is there, as 0, from the start
        self._total = Histogram(
            "serving_request_seconds", "From submission to answer", ["outcome"], buckets=_SECONDS, registry=registry
        )
        self._wait = Histogram(
            "serving_wait_seconds", "From submission to the run", buckets=_SECONDS, registry=registry
        )
        self._run = Histogram("serving_run_seconds", "One run of the model", buckets=_SECONDS, registry=registry)
        self._rows = Histogram("serving_batch_rows", "Requests in a run", buckets=_ROWS, registry=registry)
        self._failed_runs = Counter("serving_failed_runs", "Runs that raised", registry=registry)
        self._true = Counter("serving_true_elements", "Elements of requests that were run", registry=registry)
        self._padded = Counter("serving_padded_elements", "Elements that were run, with padding", registry=registry)

    def answered(self, event: Answered) -> None:
        self._requests.labels(event.outcome.value).inc()
        if event.outcome in (Outcome.OK, Outcome.FAILED, Outcome.EXPIRED, Outcome.CANCELLED, Outcome.ABANDONED):
            self._total.labels(event.outcome.value).observe(event.total_s)

    def ran(self, event: Ran) -> None:
        self._run.observe(event.run_s)
        self._rows.observe(len(event.sizes))
        self._failed_runs.inc(event.failed)
        for wait_s in event.waits_s:
            self._wait.observe(wait_s)
        self._true.inc(sum(event.sizes))
        self._padded.inc(event.padded_rows * event.padded_size)


def watch_queue(registry: CollectorRegistry, depth: Callable[[], int]) -> None:
    """Exports the number of requests that wait, read at every scrape."""
    Gauge("serving_queue_depth", "Requests that wait", registry=registry).set_function(depth)


def watch_compiles(registry: CollectorRegistry, read_metrics: Callable[[], Metrics]) -> None:
    """Exports the backend's counters, read at every scrape: `watch_compiles(registry, dynaxla.read_metrics)`."""
    registry.register(_Compiles(read_metrics))


class _Compiles(Collector):
    def __init__(self, read_metrics: Callable[[], Metrics]) -> None:
        self._read_metrics = read_metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._read_metrics()
        yield CounterMetricFamily("dynaxla_graphs", "Graphs handed over by Dynamo", metrics.graphs)
        yield CounterMetricFamily("dynaxla_compiles", "Executables compiled", metrics.compiles)
        yield CounterMetricFamily("dynaxla_misses", "Calls of a frozen function without their program", metrics.misses)
        yield CounterMetricFamily("dynaxla_evictions", "Executables dropped", metrics.evictions)
        yield CounterMetricFamily("dynaxla_compile_seconds", "Spent in XLA's compiler", metrics.compile_s)
        yield CounterMetricFamily("dynaxla_eager_ops", "Ops that run in eager", metrics.eager_ops)
        yield CounterMetricFamily("dynaxla_exact_shapes", "Parts compiled per exact shape", len(metrics.exact_shapes))
