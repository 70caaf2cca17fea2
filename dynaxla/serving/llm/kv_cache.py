"""The kv cache: keys and values of all slots, in tensors that are allocated once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from dynaxla.errors import OptionError
from dynaxla.serving.llm.tensor_parallel import ModelDevices

_HINT = "serve a decoder whose cache is the keys and values of each layer"


@dataclass(frozen=True, slots=True)
class SlotView:
    """The slots and positions that a call reads and writes.

    Attributes:
        slots: int64 [rows]: the slot of each row.
        positions: int64 [rows, q]: where new keys and values go; the last one is where zeros go, for tokens nobody wants.
        wanted: bool [rows, q].
        reads: so many positions are read, from the first one on.
        leading: the slots are 0, 1, ..., so that they are read where they lie.
    """

    slots: Tensor
    positions: Tensor
    wanted: Tensor
    reads: int
    leading: bool


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the kv cache, for one call.

    Keys are [slots, heads, key dim, max_seq_len + 1], values [slots, heads, max_seq_len + 1, dim].

    So both lie as the right side of a product does: keys the other way around take XLA's CPU twice as long. Nothing is
    written in place: the updated tensors are the layer's `keys` and `values` afterwards.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, place: SlotView) -> None:
        super().__init__()
        self.keys, self.values, self._place = keys, values, place
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        place = self._place
        wanted = place.wanted[:, None, :, None]
        # A value that is no number would be one in every product with it, however little it weighs.
        keys, values = (torch.where(wanted, new, 0).to(self.keys.dtype) for new in (key_states, value_states))
        self.keys = put_keys(self.keys, place.slots, place.positions, keys)
        self.values = put_values(self.values, place.slots, place.positions, values)
        near, theirs = self.keys[..., : place.reads], self.values[:, :, : place.reads]
        if place.leading:
            count = place.slots.shape[0]
            return near[:count].mT, theirs[:count]
        return near.index_select(0, place.slots).mT, theirs.index_select(0, place.slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._place.reads, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._place.reads


def put_keys(kept: Tensor, slots: Tensor, positions: Tensor, new: Tensor) -> Tensor:
    """Keys [slots, heads, dim, max_seq_len + 1] with new ones [rows, heads, q, dim] at positions [rows, q] of slots [rows]."""
    heads, dims = (torch.arange(size, device=kept.device) for size in kept.shape[1:3])
    where = (slots[:, None, None, None], heads[:, None, None], dims[:, None], positions[:, None, None, :])
    return torch.index_put(kept, where, new.mT)


def put_values(kept: Tensor, slots: Tensor, positions: Tensor, new: Tensor) -> Tensor:
    """As `put_keys`, for values [slots, heads, max_seq_len + 1, dim]."""
    heads = torch.arange(kept.shape[1], device=kept.device)
    return torch.index_put(kept, (slots[:, None, None], heads[:, None], positions[:, None, :]), new)


def cache_of(kept: Sequence[Tensor], place: SlotView) -> Cache:
    """The slots as a cache of transformers, from keys and values, layer by layer."""
    return Cache(layers=[SlotLayer(kept[i], kept[i + 1], place) for i in range(0, len(kept), 2)])


def list_cache_tensors(cache: Cache) -> tuple[Tensor, ...]:
    """Keys and values, layer by layer, of what `cache_of` gave."""
    return tuple(tensor for layer in _layers(cache) for tensor in (layer.keys, layer.values))


def empty_slots(model: PreTrainedModel, slots: int, max_seq_len: int, devices: ModelDevices) -> list[Tensor]:
    """Zero keys and values on the model's devices, layer by layer, for `slots` sequences of `max_seq_len` tokens.

    Raises:
        OptionError: the model's cache is something else.
    """
    found = []
    for (heads, dim), (value_heads, value_dim) in _shapes(model):
        found += [(slots, heads, dim, max_seq_len + 1), (slots, value_heads, max_seq_len + 1, value_dim)]
    return [devices.make_cache(shape, model.dtype) for shape in found]


def _shapes(model: PreTrainedModel) -> list[list[tuple[int, int]]]:
    """Heads and dim of keys and values, layer by layer, as a model of the same kind without memory gives them."""
    name, config = type(model).__name__, model.config
    with torch.device("meta"), torch.no_grad():
        # In the dtype that every op knows on "meta": products of experts know no other.
        twin = _without_memory(model).bfloat16().eval()
        ids, cache = torch.zeros((1, 1), dtype=torch.int64), DynamicCache(config=config)
        try:
            twin(input_ids=ids, past_key_values=cache, use_cache=True)
        except TypeError as error:
            raise OptionError(f"{name} takes no past_key_values: {error}", _HINT) from None
        except Exception as error:  # whatever the model does with values, which "meta" has none of
            raise OptionError(f"{name} looks at values to make its cache: {error}", _HINT) from error
    if not cache.layers:
        raise OptionError(f"{name} left its cache empty", _HINT)
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        plain = isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == values.dim() == 4
        if not plain or hasattr(layer, "update_conv_state") or hasattr(layer, "update_indexer"):
            raise OptionError(
                f"layer {number} of {name} keeps a {type(layer).__name__}, not only keys and values", _HINT
            )
    return [[tuple(kept.shape[1::2]) for kept in (layer.keys, layer.values)] for layer in _layers(cache)]


def _without_memory(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model, adapters and all, whose tensors have sizes alone."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    memo |= {id(weight): torch.nn.Parameter(weight.to("meta"), weight.requires_grad) for weight in model.parameters()}
    return copy.deepcopy(model, memo)


def _layers(cache: Cache) -> list[Any]:
    """Each with `keys` and `values`."""
    return list(cache.layers)
