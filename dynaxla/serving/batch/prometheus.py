"""Prometheus metrics of a batching server. Needs the `serve` extra."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from dynaxla.serving.batch.events import BatchFinished, Observer
from dynaxla.serving.events import RequestFinished
from dynaxla.serving.prometheus import MetricFactory, RequestMetrics, watch_gauge

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class PrometheusObserver(Observer):
    """Counts requests and runs in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricFactory(registry, "serving", _SECONDS)
        self._requests = RequestMetrics(make)
        self._wait = make.seconds("wait", "From submission to the run")
        self._run = make.seconds("run", "One run of the model")
        self._rows = make.histogram("batch_rows", "Requests in a run", _ROWS)
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
