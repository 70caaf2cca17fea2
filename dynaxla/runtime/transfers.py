"""Copies between torch's host tensors and device buffers, which never share memory that is written later."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dynaxla.errors import ExecutionError
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.pjrt_clients import PjrtClient, cpu_client
from dynaxla.types import TensorSpec

MAX_SPECS = 4096
"""The size of the cache of specs: every call of a graph or an op needs the specs of its results."""


def upload(client: PjrtClient, tensor: torch.Tensor) -> Buffer:
    """Copies a row-major host tensor, which may be written afterwards, to a buffer."""
    return upload_readonly(client, tensor.clone(memory_format=torch.contiguous_format))


def upload_readonly(client: PjrtClient, tensor: torch.Tensor) -> Buffer:
    """Makes a buffer of a row-major host tensor that is never written afterwards; the two may share memory."""
    with xla.load().TracebackScope():
        if client.shares_host_memory:
            return client.to_buffer(tensor)
        return xla.copy_to_device(cpu_client().to_buffer(tensor), client.device)


def download(client: PjrtClient, buffer: Buffer) -> torch.Tensor:
    """Copies a buffer to a row-major host tensor. Waits for the run that computes the buffer.

    Raises:
        ExecutionError: that run failed.
    """
    return host_view(client, buffer).clone()


def host_view(client: PjrtClient, buffer: Buffer) -> torch.Tensor:
    """Returns a buffer's values as a read-only host tensor, which may share the buffer's memory. That holds for plugins too:
    jaxlib copies no buffer of a client whose platform is called "cpu". Waits for the run that computes the buffer.

    Raises:
        ExecutionError: that run failed.
    """
    if client.shares_host_memory:
        return client.to_tensor(buffer)
    client.await_peers(buffer)
    devices = client.mesh_devices
    if client.peers is not None and devices is not None and devices.is_on_mesh(buffer):
        return devices.read(buffer)  # type: ignore[no-any-return]
    host = cpu_client()
    try:
        return host.to_tensor(xla.copy_to_device(buffer, host.device))
    except xla.load().Error as error:
        raise ExecutionError(str(error)) from error


def buffer_spec(buffer: Buffer) -> TensorSpec:
    """The shape and dtype of a buffer."""
    return _spec(buffer.shape, buffer.dtype)


@lru_cache(MAX_SPECS)
def _spec(shape: tuple[int, ...], dtype: Any) -> TensorSpec:
    """The spec of a shape and a JAX dtype; torch's dtypes have the names of numpy's and JAX's."""
    return TensorSpec(shape, getattr(torch, dtype.name))


def buffer_bytes(buffer: Buffer) -> int:
    """The bytes that a buffer takes on its device."""
    return int(buffer.nbytes)


def memory_stats(client: PjrtClient) -> dict[str, int]:
    """PJRT's memory statistics of a device: "bytes_in_use", "bytes_limit" and more. Empty if PJRT has none."""
    return dict(client.device.memory_stats() or {})
