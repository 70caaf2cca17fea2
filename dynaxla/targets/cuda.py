"""NVIDIA GPUs, by JAX's CUDA plugin."""

from __future__ import annotations

import os
from functools import cache, partial

from dynaxla.runtime.pjrt_clients import CudaClient
from dynaxla.targets.plugin import jax_device
from dynaxla.targets.target import Target, TargetFamily, device_index


def find(index: str) -> Target:
    number = device_index(f"cuda:{index}", index)
    return Target(f"cuda:{number}", client=partial(cuda_client, number))


@cache
def cuda_client(index: int) -> CudaClient:
    """JAX's CUDA client on device `index`.

    Raises:
        TargetError: the CUDA plugin is not installed, or there is no such device.
    """
    # torch allocates most of the GPU's memory; JAX would by default reserve three quarters of it at start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax_device("cuda", index, "install the cuda12 or cuda13 extra of dynaxla")
    return CudaClient(device.client, device)


FAMILY = TargetFamily("cuda", ("cuda", "cuda:1"), find, torch_device="cuda")
