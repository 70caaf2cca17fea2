"""NVIDIA GPUs, by JAX's CUDA plugin."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from dynaxla.isolation.once import once
from dynaxla.runtime.pjrt_clients import CudaClient, HostTransferClient
from dynaxla.targets.plugin import jax_device
from dynaxla.targets.target import Target, TargetFamily, device_index


def find(index: str) -> Target:
    number = device_index(f"cuda:{index}", index)
    return Target(f"cuda:{number}", client=partial(copying_client, number), torch_client=partial(cuda_client, number))


@once
def copying_client(index: int) -> HostTransferClient:
    """JAX's CUDA client on device `index`, for tensors of the host and of the device "dynaxla".

    Raises:
        TargetError: the CUDA plugin is not installed, or there is no such device.
    """
    device = _device(index)
    return HostTransferClient(device.client, device, "cuda")


@once
def cuda_client(index: int) -> CudaClient:
    """JAX's CUDA client on device `index`, for torch's tensors on it.

    Raises:
        TargetError: the CUDA plugin is not installed, or there is no such device.
    """
    device = _device(index)
    return CudaClient(device.client, device, index)


def _device(index: int) -> Any:
    # torch allocates most of the GPU's memory; JAX would by default reserve three quarters of it at start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return jax_device("cuda", index, "install the cuda12 or cuda13 extra of dynaxla")


FAMILY = TargetFamily("cuda", ("cuda", "cuda:1"), find, torch_device="cuda")
