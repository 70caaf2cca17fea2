"""A serving loop: requests of varying sizes are batched by bucket, run by one worker, and answered one by one.

    settings = Settings(sizes=Explicit((32, 64, 128)), max_size=128, max_batch=16)
    with Server(run, len, settings) as server:
        future = server.submit(tokens, deadline_s=0.5)

`serving.awaiting` is the same for coroutines, `serving.prometheus` exports what happens (the `serve` extra).
"""

from __future__ import annotations

from dynaxla.serving.events import Answered, Observer, Outcome, Ran
from dynaxla.serving.lifecycle import State
from dynaxla.serving.loop import Server
from dynaxla.serving.settings import Settings

__all__ = ["Answered", "Observer", "Outcome", "Ran", "Server", "Settings", "State"]
