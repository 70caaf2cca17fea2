"""What is counted of an engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from dynaxla.serving.events import GenerationFinished, Outcome, RequestFinished, StepFinished
from dynaxla.serving.prometheus import EngineMetrics, watch_engine


def test_counts() -> None:
    registry = CollectorRegistry()
    observer = EngineMetrics(registry)
    watch_engine(registry, lambda: 3, lambda: 2, lambda: 4096)
    observer.slot_assigned(0.1)
    observer.first_token(0.2)
    observer.next_tokens(0.6, 3)
    observer.step_finished(StepFinished("decode", 4, 2, 5, 12, 0.1, 2))
    observer.step_finished(StepFinished("decode", 4, 2, 0, 0, 0.1, 2, failed=True))
    observer.request_finished(GenerationFinished(Outcome.OK, 1.0, 7, 4, 5))
    observer.request_finished(RequestFinished(Outcome.QUEUE_FULL))
    found = {
        "llm_queue_depth": 3,
        "llm_between_tokens_seconds_count": 3,
        "llm_between_tokens_seconds_sum": 0.6,
        "llm_prompt_tokens_total": 7,
        "llm_cached_tokens_total": 4,
        "llm_tokens_total": 5,
        "llm_slots_used": 2,
        "llm_kv_cache_bytes": 4096,
    }
    for name, value in found.items():
        assert abs((registry.get_sample_value(name) or 0) - value) < 1e-9, name
    assert registry.get_sample_value("llm_padded_tokens_total", {"kind": "decode"}) == 12
    assert registry.get_sample_value("llm_failed_steps_total", {"kind": "decode"}) == 1
    assert registry.get_sample_value("llm_requests_total", {"outcome": "queue_full"}) == 1
