"""Calls of ops whose sizes vary: from a call to its graph's inputs, and from the graph's results to the op's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from dynaxla.device.dynamic_op_graphs import DynamicOpGraph
from dynaxla.device.op_call import OpInvocation
from dynaxla.device.op_results import resize_output
from dynaxla.device.padded_buffers import BufferCopies, PaddedBuffer
from dynaxla.device.shape_generic_key import NotShapeGeneric
from dynaxla.device.storage import DeviceStorage, DeviceStorages
from dynaxla.device.view_layout import Ints
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.types import TensorSpec

MOST_COPIED = 3
"""So often an array of the same sizes, behind others, is copied to pad it: then its sizes get a program of their own. So come
the weights of a network's layers; what grows lies in corners, and what the host gives is another array each time."""


@dataclass(slots=True)
class DynamicCall:
    """A call's sizes, which a graph of buckets serves.

    Attributes:
        values: the sizes.
        copied: how often, behind other sizes, the same memory lay in no corner.
    """

    graph: DynamicOpGraph
    values: Ints
    copied: int = 0
    _memory: ref[DeviceStorage] | None = None

    def is_worth(self, call: OpInvocation) -> bool:
        """Whether the graph is to serve this call, too."""
        if self.graph.last is not self:
            self.graph.last = self
            memory = next((each for each in self._varying(call) if each.corner is None), None)
            if memory is not None and self._memory is not None and self._memory() is memory:
                self.copied += 1
            self._memory = None if memory is None else ref(memory)
        return self.copied < MOST_COPIED

    def _varying(self, call: OpInvocation) -> list[DeviceStorage]:
        return [call.memories[place] for place in self.graph.varying]


@dataclass(frozen=True, slots=True)
class DynamicOpRunner:
    """Runs calls in graphs of buckets.

    Attributes:
        seed: gives the seed of a call that draws, of the generator that it names.
    """

    memories: DeviceStorages
    corners: BufferCopies
    seed: Callable[[torch.Generator | None], torch.Tensor]

    def run(self, served: DynamicCall, call: OpInvocation, made_by: str) -> list[torch.Tensor]:
        """The call's results, each once; what it writes is bound.

        Raises:
            ExecutionError: the run failed at once.
            DynaxlaError: a program cannot be compiled, or a bucket not be padded; nothing was written.
            NotShapeGeneric: a result is no tensor of the device, or lies inside of a memory; nothing was written.
        """
        graph, args = served.graph, self._inputs(served, call)
        with torch.no_grad():
            outputs = graph.function(args)
        made = _apart(outputs, call, self.memories, made_by)
        for each in made:
            _lie_in_corner(self.memories.of(each), self.corners)
        first = len(made) - len(graph.captured.writes)
        self._write(graph, call, made[first:])
        return made[:first]

    def _write(self, graph: DynamicOpGraph, call: OpInvocation, made: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            NotShapeGeneric: a memory's new array is not like its old one; nothing was written.
        """
        writes = list(zip(graph.captured.writes, made, strict=True))
        if any(not w.resized and self.memories.of(new).spec != call.memories[w.memory].spec for w, new in writes):
            raise NotShapeGeneric("a memory's new array is not like its old one")
        for write, new in writes:
            if write.resized:
                resize_output(call.tensors[write.tensor], new)
            else:
                call.memories[write.memory].share(self.memories.of(new))

    def _inputs(self, served: DynamicCall, call: OpInvocation) -> list[Any]:
        graph = served.graph
        inputs = graph.captured.inputs
        args: list[Any] = [
            self.memories.tensor(memory) if place is None else call.tensors[place]
            for memory, place in zip(call.memories, graph.arrays, strict=True)
        ]
        if inputs.starts:
            args.append(torch.tensor(call.starts, dtype=torch.int64, device="cpu"))
        for dtype, which in inputs.numbers:
            args.append(torch.tensor([call.numbers[i] for i in which], dtype=dtype, device="cpu"))
        args += [*call.hosts, *(served.values[place] for place in graph.sizes)]
        return args + [self.seed(call.generator)] * graph.seeds if graph.seeds else args


def _apart(outputs: Sequence[Any], call: OpInvocation, memories: DeviceStorages, made_by: str) -> list[torch.Tensor]:
    """The outputs, each with a memory of its own, as those of an op are.

    Raises:
        NotShapeGeneric: one is of the host, or lies inside of a memory.
    """
    taken, made = list(call.memories), list[torch.Tensor]()
    for output in outputs:
        memory = get_attached_memory(output.untyped_storage())
        if memory is None or output.storage_offset():
            raise NotShapeGeneric("a result is no tensor of its own")
        if any(memory is other for other in taken):
            own = DeviceStorage(memory.spec)
            own.share(memory)
            output = memories.tensor(own, TensorSpec.from_tensor(output), output.stride())
            memory = own
        memory.made_by = made_by
        taken.append(memory)
        made.append(output)
    return made


def _lie_in_corner(memory: DeviceStorage, corners: BufferCopies) -> None:
    """Also what fills its bucket, so that it is known to be of one."""
    if memory.corner is None and (buffer := memory.buffer) is not None:
        memory.lie_in(PaddedBuffer(buffer, memory.spec.shape, memory.spec, corners))
