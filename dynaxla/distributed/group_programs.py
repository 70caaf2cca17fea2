"""The compiled programs of a process group's collectives: one for each kind, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import torch

from dynaxla.cache.store import open_store
from dynaxla.isolation.forking import new_lock
from dynaxla.lowering.call_graph import mark_joint
from dynaxla.lowering.program_keys import module_key
from dynaxla.ops import replica_collectives as collectives
from dynaxla.options import Options
from dynaxla.runtime.client import Buffer, Client, Executable
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.runtime.pjrt_clients import cpu_client
from dynaxla.types import Groups, TensorSpec

Body = Callable[..., Sequence[jax.Array]]


class DeviceMemory(Protocol):
    """How the device's tensors are reached."""

    @property
    def client(self) -> Client:
        """Compiles and runs programs."""

    def to_buffer(self, tensor: torch.Tensor) -> Buffer:
        """The buffer of a tensor's elements, row-major."""

    def assign(self, tensor: torch.Tensor, buffer: Buffer, made_by: str) -> None:
        """Gives a tensor the elements of a buffer of its shape."""


class GroupPrograms:
    """Compiles and runs the collectives of one group.

    Args:
        ranks: of its processes, among all; each runs the same program.
    """

    def __init__(self, memory: DeviceMemory, ranks: Sequence[int]) -> None:
        self._memory = memory
        self._ranks = tuple(ranks)
        self._groups: Groups = (tuple(range(len(self._ranks))),)
        self._programs: dict[Hashable, Executable] = {}
        self._stored = ExecutableCache(open_store())
        self._lock = new_lock()

    def run(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        **parameters: Any,
    ) -> list[Buffer]:
        """Submits a collective of some tensors of the device, each by itself, in one program; returns its results.

        Args:
            kind: a function of `collectives` of an operand and the groups, which takes pieces of the elements in order.
            shapes: of the results.
            parameters: further arguments of the function.

        Raises:
            OptionError: there is no such collective of the tensors' dtype.
            DistributedError: another process is lost, or computes something else.
        """
        specs = tuple(map(TensorSpec.from_tensor, tensors))
        key = (kind, specs, tuple(shapes), tuple(parameters.items()))
        with self._lock:
            executable = self._programs.get(key)
            if executable is None:
                executable = self._programs[key] = self._compile(kind, specs, shapes, parameters)
        return executable.run([self._memory.to_buffer(tensor) for tensor in tensors])

    def _compile(
        self,
        kind: str,
        specs: Sequence[TensorSpec],
        shapes: Sequence[tuple[int, ...]],
        parameters: dict[str, Any],
    ) -> Executable:
        collective = partial(getattr(collectives, kind), groups=self._groups, **parameters)

        def collect(*operands: jax.Array) -> list[jax.Array]:
            results = [collective(x.reshape(-1)).reshape(shape) for x, shape in zip(operands, shapes, strict=True)]
            return [*results, collectives.make_work()]

        module, client, options = lower_joint(collect, specs, self._ranks), self._memory.client, Options()
        key = module_key(module, options, self._stored.environment(client)) if self._stored.active else None
        return self._stored.share(
            key,
            lambda: None if key is None else self._stored.find(key, client),
            lambda key: self._stored.compile(key, client, module, options.compile_limits)[0],
            options.compile_timeout_s,
        )


def lower_joint(body: Body, specs: Sequence[TensorSpec], ranks: Sequence[int]) -> bytes:
    """Lowers a JAX function, which may call collectives, to a module that these processes run together."""
    from dynaxla.ops.promotion import JNP_DTYPES

    operands = [jax.ShapeDtypeStruct(spec.shape, JNP_DTYPES[spec.dtype]) for spec in specs]
    with jax.enable_x64(True), jax.default_device(cpu_client().device):
        text = str(jax.jit(body, keep_unused=True).lower(*operands).compiler_ir("stablehlo"))
    return f"{mark_joint(tuple(ranks))}\n{text}".encode()
