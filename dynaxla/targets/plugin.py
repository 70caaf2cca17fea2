"""Other devices: by the name of a PJRT plugin that JAX finds ("rocm", "metal:1"), or by the path of a plugin's library.

Such a device has no known properties, so data is copied both ways through the host, and no rewrite is specific to it.
"""

from __future__ import annotations

import difflib
import os
from contextlib import nullcontext
from functools import partial
from typing import Any

from dynaxla.errors import TargetError
from dynaxla.isolation.once import once
from dynaxla.runtime import xla
from dynaxla.runtime.pjrt_clients import HostTransferClient
from dynaxla.runtime.process_set import joined_processes
from dynaxla.targets.target import Target

_NO_PLUGIN = (
    "install a package that gives JAX a plugin of that name (entry point `jax_plugins`), or name a plugin's .so file"
)


def find(name: str) -> Target:
    """The target of a plugin's device, whose number follows the last colon; default 0."""
    plugin, _, index = name.rpartition(":")
    if not plugin or not index.isdecimal():
        plugin, index = name, "0"
    return Target(name, client=partial(plugin_client, plugin, int(index)))


@once
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


def jax_device(platform: str, index: int, hint: str = _NO_PLUGIN) -> Any:
    """Device `index` of a platform of JAX: a built-in one or that of a plugin (entry point `jax_plugins`).

    Args:
        platform: JAX's name of the platform: "cuda", "rocm".
        hint: the error's advice if JAX does not have the platform.

    Raises:
        TargetError: JAX has no such platform, or the platform has no such device.
    """
    import jax

    processes = joined_processes()
    try:
        with nullcontext() if processes is None else xla.joining_backends(*processes.place):
            devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        near = difflib.get_close_matches(platform, sorted(xla.known_platforms() - {platform}), n=1)
        meant = f"did you mean {near[0]!r}? Else " if near else ""
        raise TargetError(f"JAX has no {platform} devices here: {error}", f"{meant}{hint}") from error
    return _at(devices, index, platform)


def plugin_device(path: str, index: int) -> Any:
    """Device `index` of the PJRT plugin in a shared library.

    Raises:
        TargetError: the file does not exist or is no PJRT plugin, or the plugin has no such device.
    """
    return _at(_load_client(path).local_devices(), index, path)


@once
def _load_client(path: str) -> Any:
    processes = joined_processes()
    try:
        return xla.plugin_client(path, *(() if processes is None else processes.place))
    except xla.load().Error as error:
        hint = "name a shared library that exports GetPjrtApi, on a machine that has its device"
        if processes is not None:
            hint += "; the plugin must take the options node_id and num_nodes, by which it joins the job's processes"
        raise TargetError(f"{path} gives no PJRT client: {error}", hint) from error


def _at(devices: Any, index: int, platform: str) -> Any:
    if index >= len(devices):
        raise TargetError(f"there is no {platform}:{index}", f"devices here: {len(devices)}")
    return devices[index]
