"""The only importer of jaxlib's client internals; free of torch, for the child process that compiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Compiled:
    """Attributes:
    executable: serialized for the embedded CPU client; None if XLA compiles the program but cannot serialize it.
    """

    executable: bytes | None


@dataclass(frozen=True, slots=True)
class Refused:
    """Attributes:
    message: what XLA said.
    """

    message: str


class Jaxlib:
    """jaxlib's bindings, loaded."""

    def __init__(self) -> None:
        from jaxlib import _jax, xla_client

        self.xla_client: Any = xla_client
        self.jax: Any = _jax
        self.Error: type[Exception] = xla_client.XlaRuntimeError


@cache
def load() -> Jaxlib:
    """Imports jaxlib once per process; creates no client and probes no device."""
    return Jaxlib()


@cache
def embedded_cpu() -> Any:
    """The embedded CPU client: the package's own, so that the user's JAX settings neither matter nor change."""
    # Synchronous: an eager reader of a CPU tensor has nothing to wait on, so every call waits for its results anyway,
    # and running in the caller's thread saves 25 us of hand-over per call.
    return load().xla_client.make_cpu_client(asynchronous=False)


def compile_options(device: Any) -> Any:
    """XLA's options for a program of one device."""
    import numpy as np

    xla_client = load().xla_client
    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    return options


def compile_on(client: Any, device: Any, module: bytes | str) -> Any:
    """A loaded executable of a StableHLO module (bytecode or text).

    Raises:
        Jaxlib.Error: XLA refused the module.
    """
    devices = load().jax.DeviceList((device,))
    return client.compile_and_load(module, devices, compile_options(device))


def load_on(client: Any, device: Any, serialized: bytes) -> Any:
    """A loaded executable of what `compile_module` serialized."""
    return client.deserialize_executable(serialized, load().jax.DeviceList((device,)), compile_options(device))


def compile_module(module: bytes) -> Compiled | Refused:
    """Compiles a StableHLO module (bytecode or text) and serializes the executable; runs in the child (`runtime.compiler`)."""
    client = embedded_cpu()
    error = load().Error
    try:
        executable = compile_on(client, client.devices()[0], module)
    except error as refusal:
        return Refused(str(refusal))
    try:
        return Compiled(executable.serialize())
    except error:
        return Compiled(None)
