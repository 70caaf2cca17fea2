"""Any other device: by the name of a PJRT plugin that JAX finds ("rocm", "metal:1"), or by the path of a plugin's file.

Nothing is known of such a device, so data is copied both ways through the host, and no rewrite is made for its sake alone.
"""

from __future__ import annotations

import os
from functools import cache, partial

from dynaxla.runtime.pjrt_clients import HostTransferClient
from dynaxla.runtime.plugin_devices import jax_device, plugin_device
from dynaxla.targets.target import Target


def find(name: str) -> Target:
    """The target of a plugin: of its device 0, or of the one whose number stands behind the last colon."""
    plugin, _, index = name.rpartition(":")
    if not plugin or not index.isdecimal():
        plugin, index = name, "0"
    return Target(name, client=partial(plugin_client, plugin, int(index)))


@cache
def plugin_client(plugin: str, index: int) -> HostTransferClient:
    """A device of a plugin, which is a platform of JAX's, or a path (anything with a slash, or that ends in .so).

    Raises:
        TargetError: there is no such plugin, or it finds no device, or not that one.
    """
    if os.sep in plugin or plugin.endswith(".so"):
        device = plugin_device(os.path.realpath(plugin), index)
        return HostTransferClient(device.client, device, device.client.platform)
    device = jax_device(plugin, index)
    return HostTransferClient(device.client, device, plugin)
