"""The server for coroutines: a request is awaited, and leaves the queue when nobody awaits it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynaxla.errors import DeadlineExceeded
from dynaxla.serving.loop import Payload, Result, Server


async def serve(
    server: Server[Payload, Result], payloads: Sequence[Payload], deadline_s: float | None = None
) -> list[Result]:
    """Submits requests, all or none, and waits for their results, in order.

    If one fails, or the task that awaits is cancelled, the rest leave the queue. The deadline is kept to the moment, also
    while a batch runs.

    Args:
        server: a server that is serving.
        payloads: what its `run` will be given.
        deadline_s: seconds from now that this may take.

    Raises:
        DeadlineExceeded: it took longer.
        ServingError: what `Server.submit` raises.
        Exception: what the model raised for one of these requests alone.
    """
    futures = server.submit_all(payloads, deadline_s)
    try:
        async with asyncio.timeout(deadline_s) as timeout:
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
    except TimeoutError:
        if timeout.expired() and deadline_s is not None:
            raise DeadlineExceeded(deadline_s) from None
        raise
    finally:
        for future in futures:
            future.cancel()
