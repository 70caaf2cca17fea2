"""A loader whose batches come to the device while the one before them computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from dynaxla.device.registration import use
from dynaxla.device.sharding import note_values, place_rows
from dynaxla.errors import OptionError
from dynaxla.mesh import Mesh
from dynaxla.torch_api.pytree import tree_map_only
from dynaxla.types import DEVICE_TYPE

_POLL_S = 0.1

Move = Callable[[Any], tuple[Any, Callable[[], None]]]
"""Moves a batch; returns it, and what is done where it is used."""


class DeviceLoader:
    """What a loader gives, with its tensors on the device: a thread takes the next batches from it and copies them there.

    Any number of iterations may be under way. One that is left early ends its thread.

    Args:
        loader: a `DataLoader` or whatever else gives batches: tensors, or dicts, lists, tuples and named tuples of them.
        ahead: how many batches lie on the device beyond the one that is worked on.
        mesh: the mesh over which tensors are split along their first dim; None: they come to one device. Tensors without dims
            come to every device. If several processes have the mesh, each loads the rows that its devices get, and the batch is
            one process's rows after the other's; processes whose devices get the same rows load the same.
        axis: the axis of the mesh, or axes.

    Raises:
        OptionError: `ahead` is less than 1, or no number.
        ShardingError: the mesh has no such axis; where a batch would have come: the axis does not divide it.
    """

    def __init__(
        self, loader: Iterable[Any], ahead: int = 2, *, mesh: Mesh | None = None, axis: str | tuple[str, ...] = "data"
    ) -> None:
        if not isinstance(ahead, int) or ahead < 1:
            hint = "give a number of 1 or more; the device is not named here, as there is one in a process: dynaxla.use"
            raise OptionError(f"ahead={ahead!r} batches", hint)
        self._loader = loader
        self._ahead = ahead
        self._move: Move = _to_device
        if mesh is not None:
            mesh.count((axis,) if isinstance(axis, str) else axis)
            self._move = partial(_to_mesh, mesh, axis)

    def __len__(self) -> int:
        """Raises TypeError if the loader has no length."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """What else is asked of the loader, as `dataset` and `sampler`."""
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Raises whatever the loader raises, where its batch would have come."""
        ahead = _Ahead(self._loader, self._ahead, self._move)
        try:
            yield from ahead.batches()
        finally:
            ahead.left.set()


class _Ahead:
    """One iteration."""

    def __init__(self, loader: Iterable[Any], most: int, move: Move) -> None:
        use()
        self._loader = loader
        self._move = move
        self._found: queue.Queue[tuple[tuple[Any, Callable[[], None]], BaseException | None]] = queue.Queue(most)
        self._grad = torch.is_grad_enabled()
        self.left = threading.Event()

    def batches(self) -> Iterator[Any]:
        threading.Thread(target=self._run, name="dynaxla-loader", daemon=True).start()
        while True:
            (batch, on_use), error = self._found.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            on_use()
            yield batch

    def _run(self) -> None:
        try:
            with torch.set_grad_enabled(self._grad):
                for batch in self._loader:
                    self._give(self._move(batch), None)
                    if self.left.is_set():
                        return
            error: BaseException = StopIteration()
        except BaseException as raised:  # it is the reader's, in whose thread it is raised again
            error = raised
        self._give((None, _nothing), error)

    def _give(self, batch: tuple[Any, Callable[[], None]], error: BaseException | None) -> None:
        while not self.left.is_set():
            with suppress(queue.Full):
                self._found.put((batch, error), timeout=_POLL_S)
                return


def _nothing() -> None:
    """What is done where a batch is used that no other process has."""


def _to_device(batch: Any) -> tuple[Any, Callable[[], None]]:
    return tree_map_only(torch.Tensor, lambda each: each.to(DEVICE_TYPE, non_blocking=True), batch), _nothing


def _to_mesh(mesh: Mesh, axis: str | tuple[str, ...], batch: Any) -> tuple[Any, Callable[[], None]]:
    told: list[int] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        made, checksum = place_rows(tensor, mesh, axis)
        told.extend([] if checksum is None else [checksum])
        return made

    # Processes compare what they have in common in the order of their calls, which this thread is ahead of.
    return tree_map_only(torch.Tensor, move, batch), partial(note_values, mesh, told)
