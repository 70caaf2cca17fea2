"""Finds targets by name. Families are the modules of this package with a `FAMILY`; any other name is a PJRT plugin."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

import torch

from dynaxla import targets
from dynaxla.errors import TargetError
from dynaxla.isolation.once import once
from dynaxla.runtime.client import Client, CompileOnlyClient
from dynaxla.runtime.mesh_devices import MeshDevices
from dynaxla.targets import plugin
from dynaxla.targets.target import Target, TargetFamily
from dynaxla.types import DEVICE_TYPE

HOST = torch.device("cpu")


@cache
def families() -> Mapping[str, TargetFamily]:
    """The target families, by name."""
    names = [f"{targets.__name__}.{found.name}" for found in pkgutil.iter_modules(targets.__path__)]
    found = [getattr(importlib.import_module(name), "FAMILY", None) for name in names]
    return {family.name: family for family in found if isinstance(family, TargetFamily)}


@cache
def find_target(name: str) -> Target:
    """The target of this name in options; nothing is loaded or connected yet.

    Raises:
        TargetError: there is no target of this name.
    """
    if not name:
        raise TargetError(f"{name!r} names no target", _names())
    kind, _, rest = name.partition(":")
    family = families().get(kind)
    return plugin.find(name) if family is None else family.find(rest)


@once
def registered_targets() -> dict[str, Target]:
    """The targets of device types that were registered at run time, by device type."""
    return {}


def mesh_devices() -> MeshDevices | None:
    """The devices of the process's meshes; None where tensors of the device cannot be sharded."""
    target = registered_targets().get(DEVICE_TYPE)
    return None if target is None or target.client is None else target.client().mesh_devices


def target_of_device(device: torch.device) -> Target:
    """The target for a torch device.

    Raises:
        TargetError: the device has no target.
    """
    return registered_targets().get(device.type) or _of_family(device)


@cache
def _of_family(device: torch.device) -> Target:
    for family in families().values():
        if family.torch_device == device.type:
            return family.find(str(device.index or 0))
    raise TargetError(
        f"there is no PJRT client for tensors on {device}",
        "put the tensors on the cpu or on cuda, or set options={'target': ...}",
    )


def connect(target: Target, device: torch.device = HOST) -> Client:
    """Connects to a live target and returns its client.

    Args:
        device: where the tensors of calls are.

    Raises:
        TargetError: the target is compile-only, or its device is absent, or not reached from tensors there.
    """
    if target.client is None:
        raise TargetError(f"{target.name!r} is only to compile for", f"python -m dynaxla compile; {_names()}")
    if device.type not in _elsewhere():
        return target.client()
    if target.torch_client is None or target.name != f"{device.type}:{device.index or 0}":
        hint = "leave the option out, or move the tensors to the host"
        raise TargetError(f"the target {target.name!r} takes no tensors on {device}", hint)
    return target.torch_client()


def _elsewhere() -> set[str | None]:
    """The types of torch's devices that have memory of their own and a family of targets."""
    return {family.torch_device for family in families().values()} - {HOST.type}


def compiler_for(name: str) -> tuple[Target, CompileOnlyClient]:
    """The target of this name and its compiler, which needs no device.

    Raises:
        TargetError: there is no such target, or its compiler is not installed.
    """
    target = find_target(name)
    if target.compiler is None:
        raise TargetError(f"{name!r} cannot be compiled for without its device", f"name a topology; {_names()}")
    return target, target.compiler()


def _names() -> str:
    examples = ", ".join(example for family in families().values() for example in family.examples)
    return f"targets: {examples}, and PJRT plugins by their names or paths"
