"""Other devices: by the name of a PJRT plugin that JAX finds ("rocm", "metal:1"), or by the path of a plugin's library.

Such a device has no known properties, so data is copied both ways through the host, and no rewrite is specific to it.
"""

from __future__ import annotations

import os
from functools import cache, partial

from dynaxla.runtime.pjrt_clients import HostTransferClient
from dynaxla.runtime.plugin_devices import jax_device, plugin_device
from dynaxla.targets.target import Target


def find(name: str) -> Target:
    """The target of a plugin's device, whose number follows the last colon; default 0."""
    plugin, _, index = name.rpartition(":")
    if not plugin or not index.isdecimal():
        plugin, index = name, "0"
    return Target(name, client=partial(plugin_client, plugin, int(index)))


@cache
def plugin_client(plugin: str, index: int) -> HostTransferClient:
    """The client of a plugin's device. `plugin` is a JAX platform, or a path (contains a slash or ends in .so).

    Raises:
        TargetError: there is no such plugin, or it has no such device.
    """
    if os.sep in plugin or plugin.endswith(".so"):
        device = plugin_device(os.path.realpath(plugin), index)
        return HostTransferClient(device.client, device, device.client.platform)
    device = jax_device(plugin, index)
    return HostTransferClient(device.client, device, plugin)
