"""How `torch.distributed.checkpoint` writes and reads a tensor in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Protocol

import torch

Offsets = tuple[int, ...]
"""Where a shard begins in its tensor."""


class ShardedTensors(Protocol):
    """Knows which tensors are in shards."""

    def is_sharded(self, tensor: torch.Tensor) -> bool: ...

    def list_shards(self, tensor: torch.Tensor) -> Sequence[tuple[Offsets, tuple[int, ...]]]:
        """The offsets and sizes of the shards that this process has, each once."""

    def begin_write(self, tensor: torch.Tensor) -> None:
        """From now on `open_shard` gives what the tensor has."""

    def begin_read(self, tensor: torch.Tensor) -> None:
        """From now on `open_shard` gives what the tensor gets."""

    def open_shard(self, tensor: torch.Tensor, offsets: Offsets) -> torch.Tensor:
        """A shard on the host."""


def offer_shards(tensors: ShardedTensors) -> None:
    """Has plain tensors offer their shards, as DTensor does; those that are in no shards lack the attributes, as before.

    Relies on the protocol `torch.distributed._checkpointable._Checkpointable`, which torch's planners look for by `hasattr`.
    """
    for name, method in (
        ("__create_write_items__", _list_writes),
        ("__create_chunk_list__", _list_chunks),
        ("__get_tensor_shard__", _open_shard),
    ):
        setattr(torch.Tensor, name, _OfShardedTensors(tensors, method))


class _OfShardedTensors:
    """A method that tensors in shards have."""

    def __init__(self, tensors: ShardedTensors, method: Callable[..., Any]) -> None:
        self._tensors = tensors
        self._method = wraps(method)(partial(method, tensors))

    def __get__(self, tensor: torch.Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            return self._method  # torch lists the methods of its class
        if not self._tensors.is_sharded(tensor):
            raise AttributeError(f"{type(tensor).__name__} is in no shards")
        return partial(self._method, tensor)


def _list_writes(tensors: ShardedTensors, tensor: torch.Tensor, name: str, _: object) -> list[Any]:
    from torch.distributed.checkpoint import metadata, planner

    tensors.begin_write(tensor)
    properties = metadata.TensorProperties.create_from_tensor(tensor)
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(name, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in _chunks(tensors, tensor)
    ]


def _list_chunks(tensors: ShardedTensors, tensor: torch.Tensor) -> list[Any]:
    tensors.begin_read(tensor)
    return _chunks(tensors, tensor)


def _chunks(tensors: ShardedTensors, tensor: torch.Tensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in tensors.list_shards(tensor)]


def _open_shard(tensors: ShardedTensors, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    return tensors.open_shard(tensor, tuple(index.offset))


class NotedTensor(torch.Tensor):
    """A tensor that tells how many elements were copied into it, or into a view of it."""

    note: Callable[[int], None]

    @classmethod
    def of(cls, tensor: torch.Tensor, note: Callable[[int], None]) -> NotedTensor:
        made: NotedTensor = tensor.as_subclass(cls)
        made.note = note
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(made, cls):
            made.note = args[0].note
            if function is torch.Tensor.copy_:
                made.note(made.numel())
        return made
