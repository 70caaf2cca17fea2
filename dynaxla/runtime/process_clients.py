"""PJRT clients of several processes, which meet at JAX's coordination service: jaxlib's part of it."""

from __future__ import annotations

from typing import Any

from dynaxla.runtime.xla import load

_NEVER_S, _TOGETHER_S = 24 * 60 * 60, 20


def start_coordinator(port: int, processes: int) -> Any:
    """Starts JAX's coordination service, which several processes meet at. It ends when it is dropped.

    Raises:
        Jaxlib.Error: the port is taken.
    """
    return load().jax.get_distributed_runtime_service(
        f"[::]:{port}", processes, heartbeat_timeout=_NEVER_S, shutdown_timeout=_TOGETHER_S
    )


def connect_coordinator(address: str, rank: int, timeout_s: int) -> Any:
    """Connects to the coordination service that one of the processes started.

    The service is not asked which processes are alive: where one is not, JAX ends all others.

    Args:
        address: "host:port".

    Raises:
        Jaxlib.Error: the service was not reached in time.
    """
    client = load().jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=timeout_s,
        shutdown_timeout=_TOGETHER_S,
        heartbeat_timeout=_NEVER_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    return client


def joined_cpu(coordination: Any, rank: int, processes: int, host: str | None, devices: int) -> Any:
    """A CPU client that knows the devices of other processes; its collectives are gloo's, over TCP.

    It runs programs in threads of its own, so that a caller waits for other processes only where it reads.

    Args:
        coordination: the process's client of the coordination service.
        host: where the others reach this process; None: its host's name.
        devices: as how many devices the processor is shown.
    """
    bindings = load()
    collectives = bindings.jax.make_gloo_tcp_collectives(distributed_client=coordination, hostname=host)
    return bindings.xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=coordination,
        node_id=rank,
        num_nodes=processes,
        collectives=collectives,
        num_devices=devices,
    )
