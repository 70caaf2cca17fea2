"""Events that a batching server tells its observer."""

from __future__ import annotations

from dataclasses import dataclass

from dynaxla.serving.events import RequestObserver


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """A run of the model.

    Attributes:
        sizes: the requests' sizes, in elements.
        padded_rows, padded_size: the rows and the size of the batch, padding included.
        waits_s: how long each request had waited, in seconds.
        run_s: how long the run took, in seconds.
        failed: whether it raised.
    """

    sizes: tuple[int, ...]
    padded_rows: int
    padded_size: int
    waits_s: tuple[float, ...]
    run_s: float
    failed: bool


class Observer(RequestObserver):
    """Base of observers of a batching server; its methods do nothing. See `RequestObserver` for who calls them."""

    def batch_finished(self, event: BatchFinished) -> None:
        pass
