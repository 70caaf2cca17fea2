"""The CPU of this process, by the package's own client."""

from __future__ import annotations

from dynaxla.runtime.pjrt_clients import cpu_client
from dynaxla.targets.target import Target, TargetFamily, device_index

CPU = Target("cpu", client=cpu_client, compiler=cpu_client, channels_last=True, copies_transposed=True)


def find(index: str) -> Target:
    """The CPU target; every device number means the same device."""
    device_index(f"cpu:{index}", index)
    return CPU


FAMILY = TargetFamily("cpu", ("cpu",), find, torch_device="cpu")
