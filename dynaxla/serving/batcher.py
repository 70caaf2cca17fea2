"""Requests that wait, grouped by the bucket of their size. Knows no threads and no clock: the time is an argument."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dynaxla.serving.settings import Settings


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Something to be answered.

    Attributes:
        payload: what the model is given.
        size: its size, in elements.
        bucket: the size it is padded to.
        accepted_at: when it came, in seconds of the server's clock.
        deadline_s: seconds after that when an answer is no use any more.
        due_at: when it has waited for company long enough.
        future: where the answer goes.
    """

    payload: Any
    size: int
    bucket: int
    accepted_at: float
    deadline_s: float = math.inf
    due_at: float = 0.0
    future: Future[Any] = field(default_factory=Future)

    def is_late(self, now: float) -> bool:
        return now >= self.accepted_at + self.deadline_s


Group = dict[Request, None]
"""Requests of one bucket, oldest first: a dict, since any of them may leave."""


class Waiting:
    """The queue. A group is due when it is full or when one of its requests has waited long enough."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._groups: dict[int, Group] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request) -> None:
        self._groups.setdefault(request.bucket, {})[request] = None
        self._count += 1

    def remove(self, request: Request) -> bool:
        """Whether the request was waiting."""
        group = self._groups.get(request.bucket, {})
        if request not in group:
            return False
        del group[request]
        self._count -= 1
        if not group:
            del self._groups[request.bucket]
        return True

    def take_late(self, now: float) -> list[Request]:
        """Removes the requests whose deadline has passed."""
        late = [request for group in self._groups.values() for request in group if request.is_late(now)]
        for request in late:
            self.remove(request)
        return late

    def take_batch(self, now: float, *, hurry: bool = False) -> list[Request]:
        """Removes the oldest requests of the due group whose first has waited longest; none if no group is due.

        Args:
            now: the time, in seconds of the clock that `due_at` is of.
            hurry: every group is due: no company will come.
        """
        due = [group for bucket, group in self._groups.items() if hurry or self._due_at(bucket, group) <= now]
        if not due:
            return []
        group = min(due, key=_accepted_at)
        batch = list(group)[: self._settings.rows_to_run(len(group), next(iter(group)).bucket)]
        for request in batch:
            self.remove(request)
        return batch

    def take_all(self) -> list[Request]:
        every = [request for group in self._groups.values() for request in group]
        self._groups.clear()
        self._count = 0
        return every

    def due_at(self) -> float:
        """When the next group is due; infinity if nothing waits, minus infinity if a group is full."""
        return min((self._due_at(bucket, group) for bucket, group in self._groups.items()), default=math.inf)

    def _due_at(self, bucket: int, group: Group) -> float:
        if len(group) >= self._settings.most_rows(bucket):
            return -math.inf
        return min(request.due_at for request in group)


def _accepted_at(group: Group) -> float:
    return next(iter(group)).accepted_at
