"""Servers: batches of any model (`batch`), language models (`llm`), and OpenAI's HTTP interface to these (`http`).

    settings = Settings(sizes=Explicit((32, 64, 128)), max_size=128, max_batch=16)
    with Server(run, len, settings) as server:
        future = server.submit(tokens, deadline_s=0.5)

Every server is a `worker_server.WorkerServer`: one worker thread, a bounded queue of requests (`request_queue`), a state that
only advances (`lifecycle`), events for an observer (`events`) and Prometheus metrics (`prometheus`, the `serve` extra).
"""

from __future__ import annotations

from dynaxla.serving.batch.server import Server
from dynaxla.serving.events import BatchFinished, Observer, Outcome, RequestFinished
from dynaxla.serving.lifecycle import State
from dynaxla.serving.settings import Settings

__all__ = ["BatchFinished", "Observer", "Outcome", "RequestFinished", "Server", "Settings", "State"]
