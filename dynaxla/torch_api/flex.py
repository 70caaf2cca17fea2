"""`flex_attention`: torch's higher-order operator, and the functions that it takes for scores and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention
from torch.nn.attention import flex_attention as interface
from torch.overrides import TorchFunctionMode

from dynaxla.torch_api.captured_functions import is_captured_for_us
from dynaxla.torch_api.private_device import get_registered_device_type

FLEX_ATTENTION = flex_attention


class _Gather(TorchFunctionMode):
    """Reads tensors at indices that vmap has batched, and at numbers beside them. Reading one takes its value otherwise.

    torch's own mode reads by a custom function, which vmap cannot batch while AOTAutograd traces.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, given = args
        indices = given if isinstance(given, tuple) else (given,)
        read = [each for each in indices if isinstance(each, Tensor)]
        if not read or not all(isinstance(each, (Tensor, int)) for each in indices):
            return func(*args)
        placed = [each if isinstance(each, Tensor) else torch.full_like(read[0], each) for each in indices]
        return torch.ops.aten.index.Tensor(x, placed)


def map_over_scores(
    function: Callable[..., Tensor], scores: Tensor | None, places: Sequence[Tensor], buffers: Sequence[Any]
) -> Tensor:
    """Applies a function of one score to all.

    Relies on `_vmap_for_bhqkv` of torch.nn.attention.flex_attention, by which torch maps the functions in eager.

    Args:
        function: of a score (unless `scores` is None), its batch, head, query and key, and the buffers.
        scores: [batch, heads, queries, keys].
        places: four tensors of indices, [batch], [heads], [queries] and [keys].
        buffers: tensors and numbers that the function reads.

    Returns:
        A tensor [batch, heads, queries, keys].
    """
    given = () if scores is None else (scores,)
    mapped = interface._vmap_for_bhqkv(function, prefix=(0,) * len(given), suffix=(None,) * len(buffers))
    with _Gather():
        return mapped(*given, *places, *buffers)


@cache
def accept_tensors() -> None:
    """Has `flex_attention` take tensors of the device, and in captures for this package's backend tensors of the host that
    need gradients, once per process.

    Relies on `_validate_device` of torch.nn.attention.flex_attention, which refuses both, and which Dynamo traces.
    """
    own = interface._validate_device

    @wraps(own)
    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if torch.compiler.is_compiling() and is_captured_for_us():
            return
        if query.device.type != get_registered_device_type():
            own(query, key, value)

    interface._validate_device = validate
