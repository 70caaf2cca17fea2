"""What a scrape shows."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest

import dynaxla
from dynaxla.errors import RequestTooLarge
from dynaxla.serving import Server, Settings
from dynaxla.serving.prometheus import PrometheusObserver, watch_compiles, watch_queue


def test_a_scrape_shows_requests_batches_queue_and_compiles() -> None:
    registry = CollectorRegistry()
    settings = Settings(max_size=64, max_batch=4)
    with Server(lambda texts: texts, len, settings, observer=PrometheusObserver(registry)) as server:
        watch_queue(registry, lambda: server.queue_depth)
        watch_compiles(registry, dynaxla.read_metrics)
        for future in server.submit_all(["x" * 5, "y" * 6, "z" * 7]):
            future.result(20)
        with pytest.raises(RequestTooLarge):
            server.submit("x" * 65)
    read = registry.get_sample_value
    assert read("serving_requests_total", {"outcome": "ok"}) == 3
    assert read("serving_requests_total", {"outcome": "rejected"}) == 1
    assert read("serving_requests_total", {"outcome": "cancelled"}) == 0
    assert read("serving_batch_rows_sum") == 3
    assert read("serving_true_elements_total") == 18
    assert read("serving_padded_elements_total") == 4 * 8
    assert read("serving_request_seconds_count", {"outcome": "ok"}) == 3
    assert read("serving_wait_seconds_count") == 3
    assert read("serving_queue_depth") == 0
    assert read("dynaxla_compiles_total") == dynaxla.read_metrics().compiles
    assert b"serving_run_seconds_bucket" in generate_latest(registry)
