"""Junk in all padding of the device's arrays: NaN, the largest integer or True, so that a forgotten mask shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from dynaxla.device import compiled_graphs
from dynaxla.device.padded_buffers import BufferCopies
from dynaxla.runtime.transfers import download, upload_readonly
from tests.bucketing.poison import junk, poisoned


@contextmanager
def junk_in_padding() -> Iterator[None]:
    """While it lasts, what is put into a corner has junk around it, wherever it comes from."""
    move = BufferCopies._moved

    def moved(self: BufferCopies, buffer: Any, sizes: Sequence[int]) -> Any:
        made = download(self._client, move(self, buffer, sizes))
        outside = torch.ones(made.shape, dtype=torch.bool)
        outside[tuple(slice(0, size) for size in buffer.shape)] = False
        made[outside] = junk(made.dtype)
        return upload_readonly(self._client, made)

    with mock.patch.object(BufferCopies, "_moved", moved), mock.patch.object(compiled_graphs, "pad", poisoned):
        yield
