"""The padded programs of the backend, run by eager PyTorch: pad rules are tested without lowering and without XLA.

Everything else is as always: Dynamo, AOTAutograd, the partition, the choice of buckets, padding (here with junk), the
program at a bucket, cropping. A program costs milliseconds instead of a second, and a call as much as eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node

from dynaxla import graph_builder
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.pipeline import Pipeline
from dynaxla.runtime.executable_info import MemoryUse
from tests.bucketing.poison import junk, poison_padding

aten = torch.ops.aten


@dataclass
class Runs:
    """How often programs ran."""

    count: int = 0


@contextmanager
def eager_programs() -> Iterator[Runs]:
    """Inside, backend="dynaxla" runs its programs by eager PyTorch, and padding is junk."""
    client, runs = EagerClient(), Runs()
    with mock.patch.object(graph_builder, "connect", return_value=client), eager_programs_after(0, runs):
        yield runs


@contextmanager
def eager_programs_after(compiled: int, runs: Runs) -> Iterator[None]:
    """Likewise, but for the first programs, so many, which are XLA's, on XLA's client."""
    really, left = Pipeline.compile, compiled

    def compile_some(pipeline: Pipeline, graph: Graph, spent: CompileTiming, *, fold: bool = False) -> Any:
        nonlocal left
        left -= not fold
        if left >= 0 and not fold:
            return really(pipeline, graph, spent)
        pipeline.recorder.add(**{"folds" if fold else "compiles": 1})
        return EagerExecutable(graph, runs, pipeline.client)

    with mock.patch.object(Pipeline, "compile", compile_some), poison_padding():
        yield


def xla_first(compiled: int, full: bool) -> AbstractContextManager[None]:
    """The first programs, so many, are XLA's; in the full list of tests all are."""
    return nullcontext() if full else eager_programs_after(compiled, Runs())


class EagerClient:
    """Buffers are tensors, and never the caller's own, as if they lay on a device."""

    platform = "cpu"
    shares_host_memory = False
    mesh_devices = None

    def to_buffer(self, tensor: Tensor) -> Any:
        return tensor.detach().clone()

    def shares_memory(self, buffer: Any, tensor: Tensor) -> bool:
        return False

    def to_tensor(self, buffer: Any) -> Any:
        return buffer

    def identity(self) -> dict[str, str]:
        return {}


class EagerExecutable:
    """A graph of fixed sizes, with what XLA does where eager raises.

    Without oneDNN: on processors with AMX its products of bfloat16 read the first element of the next row, too, where a row has
    an odd number, and give NaN for a row that has none (torch 2.13, [20, 7] by [7, 32]).
    """

    def __init__(self, graph: Graph, runs: Runs, client: Any) -> None:
        self._run = _Run(torch.nn.Module(), graph=graph)
        self._runs = runs
        self._client = client

    def memory_use(self) -> MemoryUse:
        return MemoryUse(0, 0, 0, 0)

    def cost(self) -> dict[str, float]:
        return {}

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        self._runs.count += 1
        tensors = [self._client.to_tensor(argument) for argument in arguments]
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
            results = self._run.run(*tensors, enable_io_processing=False)
        return [self._client.to_buffer(result.contiguous()) for result in results]


class _Run(Interpreter):
    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if isinstance(result, Tensor):
            wanted = node.meta["val"]
            assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype), f"{node.format_node()}: {result}"
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return OTHERWISE.get(target, target)(*args, **kwargs)


def _empty(*args: Any, **kwargs: Any) -> Tensor:
    made = torch.empty(*args, **kwargs)
    return made.fill_(junk(made.dtype))


def _read(op: Callable[..., Tensor], self: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    """An element out of range is junk."""
    size = self.shape[dim] if self.dim() else 1
    inside = (index >= 0) & (index < size)
    if bool(inside.all()):
        return op(self, dim, index, **kwargs)
    made = op(self, dim, torch.where(inside, index, 0), **kwargs)
    if made.shape != index.shape:
        shape = [1] * made.dim()
        shape[dim] = -1
        inside = inside.reshape(shape)
    return torch.where(inside, made, junk(made.dtype)).to(made.dtype)


def _read_index(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    inside = torch.tensor(True)
    entries: list[Tensor | None] = []
    for size, index in zip(self.shape, indices, strict=False):
        if index is None or index.dtype in (torch.bool, torch.uint8):
            entries.append(index)
            continue
        fits = (index >= -size) & (index < size)
        entries.append(torch.where(fits, index, 0).to(index.dtype))
        inside = inside & fits
    made: Tensor = aten.index.Tensor(self, entries)
    if bool(inside.all()):
        return made
    first = next(i for i, entry in enumerate(entries) if entry is not None)
    behind = made.dim() - first - inside.dim()
    return torch.where(inside.reshape(*inside.shape, *[1] * behind), made, junk(made.dtype)).to(made.dtype)


def _embedding(weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    return _read(lambda self, dim, index: self[index], weight, 0, indices.reshape(-1)).reshape(
        *indices.shape, *weight.shape[1:]
    )


def _gather(self: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    return _read(aten.gather.default, self, dim, index, **kwargs)


def _index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    return _read(aten.index_select.default, self, dim, index)


def _writing(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same op, which drops what is written out of range: it goes to a place behind the last that is cut off."""

    def write(self: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.dim():
            return op(self, dim, index, *args, **kwargs)
        size = self.shape[dim]
        longer = torch.cat([self, torch.zeros_like(self.narrow(dim, 0, 1) if size else _one(self, dim))], dim)
        inside = (index >= 0) & (index < size)
        return op(longer, dim, torch.where(inside, index, size), *args, **kwargs).narrow(dim, 0, size)

    return write


def _one(self: Tensor, dim: int) -> Tensor:
    shape = list(self.shape)
    shape[dim] = 1
    return self.new_empty(shape)


def _fill(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The only one of its kind whose negative places count from the end."""
    write = _writing(op)

    def fill(self: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
        size = self.shape[dim] if self.dim() else 1
        return write(self, dim, torch.where(index < 0, index + size, index), value)

    return fill


def _bags(op: Callable[..., Any]) -> Callable[..., Any]:
    """Padded items, of which the last bag is made and cut off, are any rows."""

    def add_up(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        inside = (indices >= 0) & (indices < weight.shape[0])
        return op(weight, torch.where(inside, indices, 0), *args, **kwargs)

    return add_up


def _bag_gradient(op: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """The gradient of a table, whose number of rows is the argument at a place: items behind the last row are dropped."""

    def add_up(*args: Any) -> Tensor:
        rows = args[place]
        return op(*args[:place], rows + 1, *args[place + 1 :])[:rows]

    return add_up


def _index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    taken = [i for i, entry in enumerate(indices) if entry is not None]
    if any(indices[i].dtype in (torch.bool, torch.uint8) for i in taken):  # type: ignore[union-attr]
        return aten.index_put.default(self, indices, values, accumulate)
    longer = self.new_zeros([size + (i in taken) for i, size in enumerate(self.shape)])
    longer[tuple(slice(size) for size in self.shape)] = self
    entries = []
    for size, index in zip(self.shape, indices, strict=False):
        wide = None if index is None else index.long()
        fits = None if wide is None else (wide >= -size) & (wide < size)
        entries.append(wide if wide is None or fits is None else torch.where(fits, wide % max(size, 1), size))
    made: Tensor = aten.index_put.default(longer, entries, values, accumulate)
    return made[tuple(slice(size) for size in self.shape)]


def _pool_backward(op: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    """The same op, where padded rows have any places: a gradient that goes to no place is dropped."""

    def put(grad: Tensor, self: Tensor, *args: Any) -> Tensor:
        *settings, indices = args
        inside = (indices >= 0) & (indices < math.prod(self.shape[-dims:]))
        return op(torch.where(inside, grad, 0), self, *settings, torch.where(inside, indices, 0))

    return put


def _cross_entropy(self: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """What is no probability gives anything."""
    chances = [torch.where((x >= 0) & (x <= 1), x, 0.5) for x in (self, target)]
    return aten.binary_cross_entropy.default(*chances, *rest)


def _dividing(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same op; eager raises for whole numbers divided by zero, of which padding may hold any."""

    def divide(self: Tensor, other: Any, **kwargs: Any) -> Tensor:
        whole = isinstance(other, Tensor) and not torch.result_type(self, other).is_floating_point
        if whole and not other.is_complex():
            other = torch.where(other == 0, 1, other).to(other.dtype)
        return op(self, other, **kwargs)

    return divide


OTHERWISE: Mapping[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    aten.empty.memory_format: _empty,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _read_index,
    aten._unsafe_index.Tensor: _read_index,
    aten.embedding.default: _embedding,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    **{
        op: _writing(op)
        for op in (
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter.reduce,
            aten.scatter.value_reduce,
            aten.scatter_add.default,
            aten.scatter_reduce.two,
            aten.index_add.default,
            aten.index_copy.default,
            aten.index_reduce.default,
        )
    },
    **{op: _fill(op) for op in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)},
    **{op: _bags(op) for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)},
    aten._embedding_bag_backward.default: _bag_gradient(aten._embedding_bag_backward.default, 6),
    aten._embedding_bag_dense_backward.default: _bag_gradient(aten._embedding_bag_dense_backward.default, 5),
    aten.binary_cross_entropy.default: _cross_entropy,
    aten.adaptive_max_pool2d_backward.default: _pool_backward(aten.adaptive_max_pool2d_backward.default, 2),
    aten.adaptive_max_pool3d_backward.default: _pool_backward(aten.adaptive_max_pool3d_backward.default, 3),
    aten.max_pool2d_with_indices_backward.default: _pool_backward(aten.max_pool2d_with_indices_backward.default, 2),
    aten.max_pool3d_with_indices_backward.default: _pool_backward(aten.max_pool3d_with_indices_backward.default, 3),
    **{
        op: _dividing(op)
        for op in (aten.div.Tensor_mode, aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default)
    },
}
"""What a program of XLA's does where eager raises: a read out of range gives anything, such a write is dropped."""
