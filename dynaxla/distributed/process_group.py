"""The process group "dynaxla" of torch.distributed: device tensors by compiled programs, host tensors by gloo.

A collective of device tensors is submitted at its call, and its results are the tensors' new values from then on. What is sent
from one process to another goes through the host: such calls of two processes need not come in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynaxla.distributed.group_programs import DeviceMemory, GroupPrograms
from dynaxla.distributed.works import CollectiveWork, HostWork, ReceiveWork
from dynaxla.errors import OptionError
from dynaxla.ops.dtypes import XLA_DTYPES
from dynaxla.runtime.process_set import ProcessSet
from dynaxla.torch_api.c10d import PythonProcessGroup, list_inner_tensors, make_options, reduction_of
from dynaxla.types import DEVICE_TYPE

Tensors = Sequence[torch.Tensor]


class DeviceProcessGroup(PythonProcessGroup):
    """A process group.

    Args:
        host: gloo's group of the same processes.
        ranks: of its processes among all.
    """

    def __init__(
        self, store: Any, rank: int, host: Any, ranks: Sequence[int], memory: DeviceMemory, processes: ProcessSet
    ) -> None:
        super().__init__(store, rank, len(ranks), DEVICE_TYPE, host)
        self._own_rank = rank
        self._count = len(ranks)
        self._host = host
        self._memory = memory
        self._processes = processes
        self._programs = GroupPrograms(memory, ranks)

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or make_options("Allreduce")
        if not _on_device(tensors):
            return self._on_host(self._host.allreduce(tensors, opts))
        return self._reduce(tensors, tensors, opts, "allreduce")

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        if not _on_device(tensors):
            return self._on_host(self._host.allreduce_coalesced(tensors, opts))
        return self._reduce(tensors, tensors, opts, "allreduce_coalesced")

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        if not _on_device(tensors):
            return self._on_host(self._host.reduce(tensors, opts))
        return self._reduce(tensors, tensors if opts.rootRank == self._own_rank else (), opts, "reduce")

    def _reduce(self, tensors: Tensors, targets: Tensors, opts: Any, what: str) -> dist.Work:
        reduction, factor = reduction_of(opts.reduceOp)
        values = tensors if factor is None else [tensor * factor for tensor in tensors]
        return self._collect("all_reduce", values, targets, what, reduction=reduction)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts or make_options("ReduceScatter"))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or make_options("ReduceScatter")
        if not _on_device(inputs):
            return self._on_host(self._host.reduce_scatter_single_coalesced(outputs, inputs, opts))
        reduction, factor = reduction_of(opts.reduceOp)
        values = inputs if factor is None else [tensor * factor for tensor in inputs]
        self._check_pieces(outputs, inputs)
        return self._collect("reduce_scatter", values, outputs, "reduce_scatter", reduction=reduction)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        opts = opts or make_options("ReduceScatter")
        if not _on_device(outputs):
            return self._on_host(self._host.reduce_scatter(outputs, inputs, opts))
        joined = [_join(each) for each in inputs]
        return self.reduce_scatter_single_coalesced(outputs, joined, opts)

    # What is moved

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        if not _on_device(tensors):
            return self._on_host(self._host.broadcast(tensors, opts))
        targets = [_as_stored(tensor) for tensor in tensors]
        return self._collect("broadcast", targets, targets, "broadcast", results=tensors, root=opts.rootRank)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        if not _on_device(inputs):
            opts = opts or make_options("Allgather")
            return self._on_host(self._host.all_gather_single_coalesced(outputs, inputs, opts))
        self._check_pieces(inputs, outputs)
        given, targets = [_as_stored(each) for each in inputs], [_as_stored(each) for each in outputs]
        return self._collect("all_gather", given, targets, "all_gather", results=outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or make_options("Allgather")
        if not _on_device(inputs):
            return self._on_host(self._host.allgather(outputs, inputs, opts))
        return self._gather(outputs, inputs, "all_gather")

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        if not _on_device(inputs):
            return self._on_host(self._host.allgather_coalesced(outputs, inputs, opts))
        turned = [[each[i] for each in outputs] for i in range(len(inputs))]
        return self._gather(turned, inputs, "all_gather")

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        if not _on_device(inputs):
            return self._on_host(self._host.gather(outputs, inputs, opts))
        return self._gather(outputs if opts.rootRank == self._own_rank else (), inputs, "gather")

    def _gather(self, outputs: Sequence[Tensors], inputs: Tensors, what: str) -> dist.Work:
        gathered = [_new_like(_as_stored(tensor), self._count) for tensor in inputs]
        work = self._collect("all_gather", [_as_stored(each) for each in inputs], gathered, what)
        for targets, whole in zip(outputs, gathered, strict=False):
            for target, piece in zip(targets, whole, strict=True):
                _copy(target, piece)
        return work.give([tensor for targets in outputs for tensor in targets])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        if not _on_device(outputs):
            return self._on_host(self._host.scatter(outputs, inputs, opts))
        target = _as_stored(outputs[0])
        is_root = opts.rootRank == self._own_rank
        whole = torch.stack([_as_stored(each) for each in inputs[0]]) if is_root else _new_like(target, self._count)
        return self._collect("scatter", [whole], [target], "scatter", results=outputs, root=opts.rootRank)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> dist.Work:
        opts = opts or make_options("AllToAll")
        if not _on_device([input]):
            given = (output, input, list(output_splits or ()), list(input_splits or ()))
            return self._on_host(self._host.all_to_all_single(*given, opts))
        target, value = _as_stored(output), _as_stored(input)
        if not output_splits and not input_splits:
            return self._collect("all_to_all", [value], [target], "all_to_all", results=[output])
        received = target.split(list(output_splits or self._even(target)))
        sent = value.split(list(input_splits or self._even(value)))
        return self._exchange(received, sent).give([output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or make_options("AllToAll")
        if not _on_device(inputs):
            return self._on_host(self._host.alltoall(outputs, inputs, opts))
        work = self._exchange([_as_stored(each) for each in outputs], [_as_stored(each) for each in inputs])
        return work.give(outputs)

    def _even(self, tensor: torch.Tensor) -> list[int]:
        return [len(tensor) // self._count] * self._count

    def _exchange(self, received: Tensors, sent: Tensors) -> CollectiveWork:
        """Pieces of different sizes, which are padded to the largest of all; the processes first say how large theirs are."""
        mine = torch.tensor([each.numel() for each in (*sent, *received)], device="cpu")
        largest = int(self._max_on_host(mine).max())
        value = _new_like(sent[0].new_empty(largest), self._count)
        for row, piece in zip(value, sent, strict=True):
            row[: piece.numel()].copy_(piece.reshape(-1))
        exchanged = torch.empty_like(value)
        work = self._collect("all_to_all", [value], [exchanged], "all_to_all")
        for target, row in zip(received, exchanged, strict=True):
            _copy(target, row[: target.numel()])
        return work

    def _max_on_host(self, numbers: torch.Tensor) -> torch.Tensor:
        opts = make_options("Allreduce")
        opts.reduceOp = dist.ReduceOp.MAX
        largest = numbers.max().reshape(1)
        self._on_host(self._host.allreduce([largest], opts)).wait()
        return largest

    # From one to another

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> dist.Work:
        held = [_as_stored(each).cpu().contiguous() for each in tensors]
        return self._on_host(self._host.send(held, destination, tag), held)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return self._receive(tensors, lambda held: self._host.recv(held, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._receive(tensors, lambda held: self._host.recv_anysource(held, tag))

    def _receive(self, tensors: Tensors, receive: Any) -> dist.Work:
        if not _on_device(tensors):
            return self._on_host(receive(tensors), tensors)
        targets = [_as_stored(each) for each in tensors]
        held = [torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in targets]
        return ReceiveWork(receive(held), held, targets, self._processes)

    # Waiting

    def barrier(self, opts: Any = None) -> dist.Work:
        """Waits for all processes of the group, and for what this one has submitted."""
        value = torch.zeros((), dtype=torch.int32, device=DEVICE_TYPE)
        return self._collect("all_reduce", [value], [value], "barrier", reduction="sum")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # How

    def _collect(
        self,
        kind: str,
        values: Tensors,
        targets: Tensors,
        what: str,
        *,
        results: Tensors | None = None,
        **parameters: Any,
    ) -> CollectiveWork:
        """Submits a collective; its results are the values of the targets, where there are any. Of tensors of a user's class
        those that they are made of are exchanged."""
        results = list(results or targets)
        values, targets = list_inner_tensors(values), list_inner_tensors(targets)
        shapes = [tuple(each.shape) for each in (targets or values)]
        buffers = self._programs.run(kind, values, shapes, **parameters)
        for target, buffer in zip(targets, buffers, strict=bool(targets)):
            self._memory.assign(target, buffer, what)
        return CollectiveWork(self._memory.client, buffers, results)

    def _on_host(self, work: Any, held: Tensors = ()) -> HostWork:
        return HostWork(work, held, self._processes)

    def _check_pieces(self, pieces: Tensors, wholes: Tensors) -> None:
        for piece, whole in zip(pieces, wholes, strict=True):
            if piece.numel() * self._count != whole.numel() or piece.dtype is not whole.dtype:
                raise OptionError(
                    f"of {self._count} processes, {tuple(whole.shape)} {whole.dtype} has no pieces of "
                    f"{tuple(piece.shape)} {piece.dtype}",
                    "the whole has as many elements as the pieces of all processes",
                )


def _on_device(tensors: Tensors) -> bool:
    return bool(tensors) and tensors[0].device.type == DEVICE_TYPE


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, by its bytes where no program takes its dtype."""
    return tensor.detach() if tensor.dtype in XLA_DTYPES else tensor.detach().view(torch.uint8)


def _new_like(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.new_empty((count, *tensor.shape))


def _join(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _copy(target: torch.Tensor, piece: torch.Tensor) -> None:
    stored = _as_stored(target)
    stored.copy_(piece.reshape(stored.shape))
