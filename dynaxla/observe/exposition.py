"""The counters of a process in Prometheus's text format. Needs prometheus-client (the `metrics` extra)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from operator import attrgetter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dynaxla.observe.recorder import Metrics
from dynaxla.observe.usage import CALL_SECONDS

COUNTERS = {
    "graphs": "Graphs captured by Dynamo, forward and backward apart",
    "compiles": "Executables of graph parts that were compiled",
    "folds": "Programs on weights alone that were compiled",
    "loads": "Executables of graph parts that were loaded",
    "fold_loads": "Programs on weights alone that were loaded",
    "captures_loaded": "Graphs that were built from a stored capture",
    "eager_ops": "Ops that run in eager",
    "lowering_failures": "Distinct calls that torch-mlir failed to lower",
    "evictions": "Executables evicted",
    "misses": "Calls of a frozen function without their program",
    "served_own": "Calls that ran in the program of their own sizes, of parts that compile in the background",
    "served_larger": "Calls that ran in a larger bucket's program",
    "served_eager": "Calls that ran in eager for lack of a program",
    "jobs_done": "Background compiles that succeeded",
    "jobs_failed": "Background compiles that failed",
    "jobs_dropped": "Background compiles that were no longer needed",
    "jobs_here": "Background compiles in a thread of this process",
    "plans": "Bucket plans that were computed",
    "traces": "Runs of ops that the device's lazy mode collected",
    "traces_apart": "Traces whose ops were run one by one",
    "verified_calls": "Calls of graphs that were compared with eager",
    "diverged_calls": "Calls of graphs whose results were not eager's",
}
"""The numbers of `Metrics` that are counters by themselves, with what they count."""

_CACHE = {
    "cache_hits": "Values found in a tier of the cache",
    "cache_misses": "Values not found in a tier of the cache",
    "cache_read_bytes": "Bytes read from a tier of the cache",
    "cache_written_bytes": "Bytes written to a tier of the cache",
}
_BUCKET = {
    "bucket_calls": "Calls in a bucket",
    "bucket_programs": "Programs compiled or loaded for a bucket",
    "bucket_true_elements": "Products of the sizes of the calls in a bucket",
    "bucket_padded_elements": "Products of the bucket's sizes, for each call in it",
}


def write_text(metrics: Metrics) -> str:
    """The counters as text, in Prometheus's exposition format."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(lambda: metrics))
    return generate_latest(registry).decode()


class MetricsCollector(Collector):
    """Exports the counters of the process to a registry, read at every scrape.

    Args:
        read_metrics: `dynaxla.read_metrics`.
    """

    def __init__(self, read_metrics: Callable[[], Metrics]) -> None:
        self._read_metrics = read_metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._read_metrics()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"dynaxla_{name}", text, getattr(metrics, name))
        yield CounterMetricFamily("dynaxla_exact_shapes", "Parts compiled per exact shape", len(metrics.exact_shapes))
        stages = metrics.stages.items()
        yield _counter("stage_runs", "Runs of a stage", ("stage",), (((name,), use.runs) for name, use in stages))
        seconds = (((name,), use.seconds) for name, use in stages)
        yield _counter("stage_seconds", "Spent in a stage of compiling", ("stage",), seconds)
        for name, text in _CACHE.items():
            read = attrgetter(name.removeprefix("cache_"))
            yield _counter(name, text, ("tier",), [((tier,), read(use)) for tier, use in metrics.cache.items()])
        yield _counter("host_ops", "Calls of the device that eager computed on the host", ("op",), _by_op(metrics))
        crossed = metrics.host_bytes.items()
        to_host = (((op, "to_host"), each.to_host) for op, each in crossed)
        to_device = (((op, "to_device"), each.to_device) for op, each in crossed)
        text = "Bytes that crossed for calls that eager computed on the host"
        yield _counter("host_bytes", text, ("op", "direction"), (*to_host, *to_device))
        yield from _collect_calls(metrics)


def _collect_calls(metrics: Metrics) -> Iterator[Metric]:
    """What is counted of parts with `call_metrics`."""
    labels = "function", "part"
    for name, text in _BUCKET.items():
        read = attrgetter(name.removeprefix("bucket_"))
        values = [
            ((part.function, str(part.part), bucket.bucket), read(bucket))
            for part in metrics.parts
            for bucket in part.buckets
        ]
        yield _counter(name, text, (*labels, "bucket"), values)
    family = HistogramMetricFamily("dynaxla_call_seconds", "From a part's call until it returns", labels=labels)
    limits = [*map(str, CALL_SECONDS), "+Inf"]
    for part in metrics.parts:
        counted = list(zip(limits, accumulate(part.counts), strict=True))
        family.add_metric((part.function, str(part.part)), counted, part.seconds)
    yield family


def _by_op(metrics: Metrics) -> Iterator[tuple[tuple[str, ...], float]]:
    return (((op,), count) for op, count in metrics.host_ops.items())


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"dynaxla_{name}", text, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family
