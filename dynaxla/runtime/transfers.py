"""Copies between torch's memory on the host and buffers of a device: what is written to one is not seen in the other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dynaxla.errors import ExecutionError
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.pjrt_clients import PjrtClient, cpu_client
from dynaxla.types import TensorSpec

MOST_SPECS = 4096
"""Every call of a graph or an op asks for those of its results."""


def upload(client: PjrtClient, tensor: torch.Tensor) -> Buffer:
    """A buffer with the values that a row-major tensor of the host has now, which may change afterwards."""
    return upload_own(client, tensor.clone(memory_format=torch.contiguous_format))


def upload_own(client: PjrtClient, tensor: torch.Tensor) -> Buffer:
    """A buffer with the values of a row-major tensor of the host, to which nobody writes afterwards."""
    with xla.load().TracebackScope():
        host = cpu_client().to_buffer(tensor)
        return host if client.shares_host_memory else xla.moved(host, client.device)


def download(client: PjrtClient, buffer: Buffer) -> torch.Tensor:
    """A row-major tensor of the host with a buffer's values, in memory of its own. Waits for the run that makes them.

    Raises:
        ExecutionError: that run failed.
    """
    return host_view(client, buffer).clone()


def host_view(client: PjrtClient, buffer: Buffer) -> torch.Tensor:
    """A tensor of the host with a buffer's values, to which nobody may write: it may lie in the buffer's own memory, also
    where a plugin's buffer was copied, as jaxlib copies nothing of a client that calls its platform "cpu". Waits for the run
    that makes them.

    Raises:
        ExecutionError: that run failed.
    """
    host = cpu_client()
    try:
        return host.to_tensor(buffer if client.shares_host_memory else xla.moved(buffer, host.device))
    except xla.load().Error as error:
        raise ExecutionError(str(error)) from error


def wait_for(buffer: Buffer) -> None:
    """Returns when the run that makes a buffer has ended; at once for a buffer that was given away, which nothing makes.

    Raises:
        ExecutionError: it failed.
    """
    if buffer.is_deleted():
        return
    try:
        buffer.block_until_ready()
    except xla.load().Error as error:
        raise ExecutionError(str(error)) from error


def spec_of(buffer: Buffer) -> TensorSpec:
    """Shape and dtype of a buffer."""
    return _spec(buffer.shape, buffer.dtype)


@lru_cache(MOST_SPECS)
def _spec(shape: tuple[int, ...], dtype: Any) -> TensorSpec:
    """torch's name of a dtype is numpy's and JAX's."""
    return TensorSpec(shape, getattr(torch, dtype.name))


def size_of(buffer: Buffer) -> int:
    """Bytes that a buffer takes on its device."""
    return int(buffer.nbytes)


def memory_of(client: PjrtClient) -> dict[str, int]:
    """What PJRT says of a device's memory: "bytes_in_use", "bytes_limit" and more. Empty where it says nothing."""
    return dict(client.device.memory_stats() or {})
