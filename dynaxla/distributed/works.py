"""What is under way in a process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynaxla.isolation.forking import new_lock
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.process_set import ProcessSet
from dynaxla.torch_api.c10d import completed_future, is_unlimited

_NO_LIMIT = timedelta(0)


class CollectiveWork(dist.Work):
    """A collective of device tensors, which have their new values since it was submitted.

    Args:
        tensors: what its future gives.
    """

    def __init__(self, client: Any, buffers: Sequence[Buffer], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._client = client
        self._buffers = list(buffers)
        self._tensors = tensors

    def give(self, tensors: Sequence[torch.Tensor]) -> CollectiveWork:
        """The same work, with other tensors as its result."""
        return CollectiveWork(self._client, self._buffers, list(tensors))

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits until the values are computed.

        Raises:
            DistributedError: another process is lost or computes something else, or the time is over.
        """
        for buffer in self._buffers:
            self._client.wait_for(buffer, None if is_unlimited(timeout) else timeout.total_seconds())
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(buffer.is_deleted() or buffer.is_ready() for buffer in self._buffers)

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Has its value at once: what reads the tensors waits for them."""
        return completed_future(self._tensors)


class HostWork(dist.Work):
    """gloo's work, whose error says which process is lost.

    Args:
        held: tensors that must live until it ends.
    """

    def __init__(self, work: Any, held: Sequence[torch.Tensor], processes: ProcessSet) -> None:
        super().__init__()
        self._work = work
        self._held = held
        self._processes = processes

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """
        Raises:
            DistributedError: another process is lost.
        """
        try:
            self._work.wait() if is_unlimited(timeout) else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._processes.explain(error) from error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future:
        return self._work.get_future()  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    def result(self) -> Any:
        return self._work.result()


class ReceiveWork(HostWork):
    """Receives on the host; the tensors of the device have the values after it was waited for."""

    def __init__(
        self, work: Any, held: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], processes: ProcessSet
    ) -> None:
        super().__init__(work, held, processes)
        self._targets = list(targets)
        self._lock = new_lock()
        self._is_copied = False

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        super().wait(timeout)
        self._copy()
        return True

    def get_future(self) -> torch.futures.Future:
        def finish(_: torch.futures.Future) -> list[torch.Tensor]:
            self._copy()
            return self._targets

        return super().get_future().then(finish)

    def _copy(self) -> None:
        with self._lock:
            if not self._is_copied:
                for target, held in zip(self._targets, self._held, strict=True):
                    target.copy_(held)
            self._is_copied = True
