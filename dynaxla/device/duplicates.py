"""Copies of buffers on their device."""

from __future__ import annotations

from dynaxla.device.recent import Recent
from dynaxla.lowering.calls import type_of
from dynaxla.options import Options
from dynaxla.runtime.client import Buffer, Executable
from dynaxla.runtime.pjrt import PjrtClient
from dynaxla.runtime.transfers import spec_of
from dynaxla.stages import TensorSpec

MOST_PROGRAMS = 256


class Duplicates:
    """Copies buffers, by a program for each shape and dtype."""

    def __init__(self, client: PjrtClient) -> None:
        self._client = client
        self._programs: Recent[Executable] = Recent(MOST_PROGRAMS)

    def of(self, buffer: Buffer) -> Buffer:
        """A buffer of the same values in memory of its own.

        Raises:
            ExecutionError: the run failed at once.
        """
        spec = spec_of(buffer)
        program = self._programs.get(spec)
        if program is None:
            program = self._programs.keep(spec, self._client.compile(_identity(spec), Options().compile_limits))
        return program.run([buffer])[0]


def _identity(spec: TensorSpec) -> bytes:
    """A program whose result is no parameter's memory, as nothing is donated."""
    value = type_of(spec)
    return f"module {{ func.func public @main(%a: {value}) -> {value} {{ return %a : {value} }} }}".encode()
