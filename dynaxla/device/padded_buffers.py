"""Arrays in the corner of larger ones, which a bucket's programs take and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dynaxla.lowering.call_graph import WORK, mark_joint, mlir_mesh, mlir_sharding, mlir_type
from dynaxla.mesh import Sharding
from dynaxla.options import Options
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.loaded_executables import PjrtExecutable
from dynaxla.runtime.mesh_devices import MeshDevices, is_sharded, sharding_of
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import buffer_spec, host_view, upload_readonly
from dynaxla.types import TensorSpec

MOST_PROGRAMS = 512


@dataclass(frozen=True, slots=True)
class PaddedBuffer:
    """An array in the corner of a buffer, whose other elements may hold anything.

    Attributes:
        buffer: with dims that are as long as the array's, or longer.
        sizes: of the buffer.
        spec: of the array.
        corners: cuts it out.
    """

    buffer: Buffer
    sizes: tuple[int, ...]
    spec: TensorSpec
    corners: BufferCopies

    def cut(self) -> Buffer:
        """The array alone.

        Raises:
            ExecutionError: the run failed at once.
        """
        return self.corners.cut(self.buffer, self.spec.shape)


class BufferCopies:
    """Copies buffers on their device: as they are, their corners, and into corners of larger ones. Safe from several threads.

    Where a client's memory is the host's, torch copies. Elsewhere programs do, each of one pair of shapes; one takes XLA some
    10 ms.

    Args:
        by_programs: whether programs do everywhere.
    """

    def __init__(self, client: PjrtClient, by_programs: bool = False) -> None:
        self._client = client
        self._on_host = client.shares_host_memory and not by_programs
        self._programs: ProgramCache[tuple[TensorSpec, TensorSpec], Executable] = ProgramCache(MOST_PROGRAMS)

    def copy(self, buffer: Buffer) -> Buffer:
        """The same values in memory of its own."""
        return self._run(
            buffer, buffer_spec(buffer).shape
        )  # also on the host: memory of torch's is donated to no program

    def cut(self, buffer: Buffer, sizes: Sequence[int]) -> Buffer:
        """What begins where the buffer does and has these sizes, none of which is larger."""
        return self._moved(buffer, sizes)

    def put(self, buffer: Buffer, sizes: Sequence[int]) -> Buffer:
        """A buffer of these sizes, which has in its corner what the given one has in its own, and else zeros.

        The given one itself, where it has these sizes.
        """
        return buffer if buffer_spec(buffer).shape == tuple(sizes) else self._moved(buffer, sizes)

    def _moved(self, buffer: Buffer, sizes: Sequence[int]) -> Buffer:
        if not self._on_host:
            return self._run(buffer, sizes)
        held = host_view(self._client, buffer)
        both = tuple([slice(0, min(one, other)) for one, other in zip(held.shape, sizes, strict=True)])
        if all(size <= was for size, was in zip(sizes, held.shape, strict=True)):
            made = held[both].clone(memory_format=torch.contiguous_format)
        else:
            made = torch.zeros(tuple(sizes), dtype=held.dtype, device="cpu")
            made[both] = held[both]
        return upload_readonly(self._client, made)

    def _run(self, buffer: Buffer, sizes: Sequence[int]) -> Buffer:
        spec = buffer_spec(buffer)
        made = replace(spec, shape=tuple(sizes))
        program = self._programs.get_or_make(
            (spec, made), lambda: self._client.compile(_program(spec, made), Options().compile_limits)
        )
        return program.run([buffer])[0]


class ShardedBufferCopies(BufferCopies):
    """Copies buffers of one device as `BufferCopies` does, and sharded ones by programs over their mesh."""

    def __init__(self, client: PjrtClient, devices: MeshDevices) -> None:
        super().__init__(client)
        self._devices = devices
        self._sharded: ProgramCache[tuple[TensorSpec, TensorSpec, Sharding, Sharding], PjrtExecutable] = ProgramCache(
            MOST_PROGRAMS
        )
        devices.reshard_by = self.reshard

    def _moved(self, buffer: Buffer, sizes: Sequence[int]) -> Buffer:
        return self._run(buffer, sizes) if is_sharded(buffer) else super()._moved(buffer, sizes)

    def _run(self, buffer: Buffer, sizes: Sequence[int]) -> Buffer:
        sharding = sharding_of(buffer)
        if sharding is None:
            return super()._run(buffer, sizes)
        spec = buffer_spec(buffer)
        made = replace(spec, shape=tuple(sizes))
        return self._run_on_mesh(buffer, made, sharding, sharding.keep_divisible(made.shape), "a copy")

    def reshard(self, buffer: Buffer, sharding: Sharding) -> Buffer:
        """The same values, sharded otherwise over the same mesh; all processes that have the mesh take part."""
        given = sharding_of(buffer)
        assert given is not None
        what = "reading a split tensor" if sharding.is_replicated else "resharding a tensor"
        return self._run_on_mesh(buffer, buffer_spec(buffer), given, sharding, what)

    def _run_on_mesh(self, buffer: Buffer, made: TensorSpec, given: Sharding, wanted: Sharding, what: str) -> Buffer:
        spec = buffer_spec(buffer)
        key = spec, made, given, wanted
        program = self._sharded.get_or_make(key, lambda: self._compile(spec, made, (given, wanted), what))
        return program.run([buffer])[0]

    def _compile(
        self, spec: TensorSpec, made: TensorSpec, shardings: tuple[Sharding, Sharding], what: str
    ) -> PjrtExecutable:
        mesh = shardings[0].mesh
        ranks = self._devices.ranks_of(mesh)
        joint = mark_joint(ranks, what) if ranks else ""
        program = self._client.compile(_program(spec, made, shardings, joint), Options().compile_limits, mesh.size)
        self._devices.set_results(program, [made], mesh)
        return program


def make_copies(client: PjrtClient) -> BufferCopies:
    """What copies the buffers of a client."""
    devices = client.mesh_devices
    return BufferCopies(client) if devices is None else ShardedBufferCopies(client, devices)


def _program(
    given: TensorSpec, made: TensorSpec, shardings: tuple[Sharding, Sharding] | None = None, joint: str = ""
) -> bytes:
    """From an array to another: its corner, or it in a corner. Nothing is donated, so no result is a parameter's memory.

    Args:
        shardings: of the two, over one mesh.
        joint: the line of a module of several processes (`mark_joint`).
    """
    value, result = mlir_type(given), mlir_type(made)
    mesh, placed = "", ("", "")
    if shardings is not None:
        mesh = mlir_mesh(shardings[0].mesh)
        placed = tuple(f" {{sdy.sharding = #sdy.sharding{mlir_sharding(each)}}}" for each in shardings)  # type: ignore[assignment]
    high = ", ".join(str(new - old) for old, new in zip(given.shape, made.shape, strict=True))
    none = ", ".join("0" for _ in given.shape)
    element = mlir_type(TensorSpec((), given.dtype))
    work = (", tensor<ui32>", [WORK], ", %work") if joint else ("", [], "")
    lines = [
        f"{joint}\nmodule {{ {mesh}" if joint else f"module {{ {mesh}",
        f"  func.func public @main(%arg0: {value}{placed[0]}) -> ({result}{placed[1]}{work[0]}) {{",
        f"  %zero = stablehlo.constant dense<{_zero(given.dtype)}> : {element}",
        f"  %0 = stablehlo.pad %arg0, %zero, low = [{none}], high = [{high}], interior = [{none}]"
        f" : ({value}, {element}) -> {result}",
        *work[1],
        f"  return %0{work[2]} : {result}{work[0]} }} }}",
    ]
    return "\n".join(lines).encode()


def _zero(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "(0.0, 0.0)"
    return "0.0" if dtype.is_floating_point else "false" if dtype is torch.bool else "0"
