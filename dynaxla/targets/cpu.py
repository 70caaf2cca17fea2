"""The CPU of this process, by the client that the package has of its own."""

from __future__ import annotations

from dynaxla.runtime.pjrt_clients import cpu_client
from dynaxla.targets.target import Family, Target, device_index

CPU = Target("cpu", client=cpu_client, compiler=cpu_client, channels_last=True, copies_transposed=True)


def find(index: str) -> Target:
    """The CPU, which is one device to PJRT, whatever its number."""
    device_index(f"cpu:{index}", index)
    return CPU


FAMILY = Family("cpu", ("cpu",), find, torch_device="cpu")
