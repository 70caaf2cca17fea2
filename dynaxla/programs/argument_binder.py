"""What a call gives as a program takes it, and what a program gives as the call's results: once per call of a part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaxla.bucketing.cropping import ToCorner
from dynaxla.programs.known_memory import KnownMemory
from dynaxla.programs.part_signature import PartSignature
from dynaxla.programs.program import Program
from dynaxla.programs.staged_arguments import StagedArguments, StagingPool
from dynaxla.runtime.client import Buffer, Client, DeviceTensors, Executable, HeldWeights
from dynaxla.runtime.host_padding import PaddedShape, pad, to_row_major
from dynaxla.runtime.weight_residency import PartWeights, WeightResidency, make_picker
from dynaxla.runtime.write_tracking import WriteTracker


class ArgumentBinder(ABC):
    """Runs the programs of one part: binds a call's arguments to buffers, and makes tensors of the results.

    Args:
        client: its buffers are the programs' arguments.
        weights: positions of the arguments that keep their values between most calls.
        residency: keeps the buffers of the weights.
        bind: gives the row-major buffer of a tensor.

    Attributes:
        crop_lazily: makes a tensor of a padded result's corner without copying it; None where nothing does.
    """

    crop_lazily: ToCorner | None = None

    def __init__(
        self,
        client: Client,
        weights: Sequence[int],
        residency: HeldWeights,
        bind: Callable[[torch.Tensor], Buffer],
    ) -> None:
        self._bind = bind
        self._pick_weights = make_picker(weights)
        self._weight_buffers = residency.buffers
        self._to_buffer = client.to_buffer
        self._to_tensor = client.to_tensor

    def run(self, program: Program, values: tuple[int, ...], args: Sequence[Any]) -> list[Any]:
        """The part's results for a call's arguments.

        Args:
            values: the call's sizes.
        """
        if (cropping := program.cropping) is not None:
            values = cropping.pick(values)
        tensors = [] if program.executable is None else self.execute(program, values, args)
        outputs = tensors if program.gives_results else [source.output(tensors, args) for source in program.outputs]
        return outputs if cropping is None else cropping.crop(outputs, values, self.crop_lazily)

    def execute(self, program: Program, values: tuple[int, ...], args: Sequence[Any]) -> list[torch.Tensor]:
        """The results of a program that has an executable, whole where they are padded.

        Args:
            values: those of the program's symbols.
        """
        assert program.executable is not None
        buffers: list[Buffer] = list(self._weight_buffers(self._pick_weights(args)))
        buffers.extend(self.bind_input(program, index, args) for index in range(len(program.inputs)))
        if program.cropping is not None:
            buffers.extend(map(self._to_buffer, program.cropping.vectors(values)))
        if program.donated:
            return self.run_donating(program, args, buffers)
        return [self._to_tensor(result) for result in program.executable.run(buffers)]

    def bind_input(self, program: Program, index: int, args: Sequence[Any]) -> Buffer:
        """The buffer of one of a program's arguments that is not a weight."""
        position, order, padded = program.inputs[index]
        tensor = args[position] if order is None else args[position].permute(order)
        return self._bind(tensor) if padded is None else self.bind_padded(tensor, padded)

    @abstractmethod
    def bind_padded(self, tensor: torch.Tensor, padded: PaddedShape) -> Buffer:
        """The row-major buffer of a tensor padded at the end of each dim; the padding may hold anything."""

    @abstractmethod
    def run_donating(self, program: Program, args: Sequence[Any], buffers: list[Buffer]) -> list[torch.Tensor]:
        """Runs a program that may take the memory of arguments for their new values.

        Args:
            args: the call's.
            buffers: the executable's arguments.

        Returns:
            The results; for a new value the argument that has it.
        """


class HostBinder(ArgumentBinder):
    """Binds tensors of the host. Their memory is torch's, of which programs take nothing. Small ones are copied."""

    def __init__(self, client: Client, weights: Sequence[int], residency: WeightResidency) -> None:
        super().__init__(client, weights, residency, self._bind_plain)
        self._client = client
        self._has_weights = residency.has_weights

    def execute(self, program: Program, values: tuple[int, ...], args: Sequence[Any]) -> list[torch.Tensor]:
        pool, executable = program.staging, program.executable
        if pool is None or executable is None:
            return super().execute(program, values, args)
        buffers = None if pool.known is None else pool.known.find(args)
        if buffers is None:
            return self._execute_staged(program, pool, executable, values, args)
        if self._has_weights:
            buffers = [*self._weight_buffers(self._pick_weights(args)), *buffers]
        return list(map(self._to_tensor, executable.run(buffers)))

    def _execute_staged(
        self,
        program: Program,
        pool: StagingPool,
        executable: Executable,
        values: tuple[int, ...],
        args: Sequence[Any],
    ) -> list[torch.Tensor]:
        try:
            staged = pool.free.pop()
        except IndexError:
            staged = StagedArguments(self._client, program, args, values)
            if pool.known is None and program.cropping is None:
                pool.known = KnownMemory(self._client, program)
        if not staged.fill(program, args, values):
            return super().execute(program, values, args)
        buffers = staged.buffers
        if self._has_weights:
            buffers = [*self._weight_buffers(self._pick_weights(args)), *buffers]
        elif staged.others:
            buffers = [*buffers]
        for index in staged.others:
            buffers[index - len(staged.buffers)] = self.bind_input(program, index, args)
        tensors = [self._to_tensor(result) for result in executable.run(buffers)]
        pool.free.append(staged)
        return tensors

    def _bind_plain(self, tensor: torch.Tensor) -> Buffer:
        return self._to_buffer(to_row_major(tensor))

    def bind_padded(self, tensor: torch.Tensor, padded: PaddedShape) -> Buffer:
        return self._to_buffer(to_row_major(pad(tensor, padded)))

    def run_donating(self, program: Program, args: Sequence[Any], buffers: list[Buffer]) -> list[torch.Tensor]:
        assert program.executable is not None
        return [self._to_tensor(result) for result in program.executable.run(buffers)]


def make_binder(
    client: Client, signature: PartSignature, watch: WriteTracker, fold: Callable[[], Executable]
) -> ArgumentBinder:
    """The binder of a part's arguments for where they lie.

    Args:
        watch: sees writes to weights of the host.
        fold: gives the program of the work that depends on weights alone.
    """
    held = PartWeights(
        signature.constants, signature.orders, signature.kept, signature.folded, fold if signature.folds else None
    )
    if isinstance(client, DeviceTensors):
        binder: ArgumentBinder = client.make_binder(signature.weights, held)
        return binder
    return HostBinder(client, signature.weights, WeightResidency(client, watch, held))
