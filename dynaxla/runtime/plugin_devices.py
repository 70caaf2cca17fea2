"""Devices of PJRT plugins: plugins that JAX finds by name, and plugins in a shared library."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any

from dynaxla.errors import TargetError
from dynaxla.runtime import xla

_NO_PLUGIN = (
    "install a package that gives JAX a plugin of that name (entry point `jax_plugins`), or name a plugin's .so file"
)


def jax_device(platform: str, index: int, hint: str = _NO_PLUGIN) -> Any:
    """Device `index` of a platform of JAX: a built-in one or that of a plugin (entry point `jax_plugins`).

    Args:
        platform: JAX's name of the platform: "cuda", "rocm".
        hint: the error's advice if JAX does not have the platform.

    Raises:
        TargetError: JAX has no such platform, or the platform has no such device.
    """
    import jax

    try:
        devices = jax.devices(platform)
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
    return _at(_plugin_client(path).devices(), index, path)


@cache
def _plugin_client(path: str) -> Any:
    try:
        return xla.plugin_client(path)
    except xla.load().Error as error:
        raise TargetError(
            f"{path} gives no PJRT client: {error}",
            "name a shared library that exports GetPjrtApi, on a machine that has its device",
        ) from error


def _at(devices: Any, index: int, platform: str) -> Any:
    if index >= len(devices):
        raise TargetError(f"there is no {platform}:{index}", f"devices here: {len(devices)}")
    return devices[index]
