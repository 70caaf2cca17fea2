"""New memory is filled where torch is to be deterministic, as eager fills it, so that a read of what nobody wrote is seen."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api import fakes

aten = torch.ops.aten

_NEW_MEMORY = frozenset(
    (
        *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default, aten.empty_like.default),
        *(aten.new_empty.default, aten.new_empty_strided.default),
    )
)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    # Dynamo captures again when the first of the two changes; torch sets the second for itself alone.
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        for node in list(graph.module.graph.nodes):
            if node.target in _NEW_MEMORY:
                _fill(node)
    return graph


def _fill(node: Node) -> None:
    value = node.meta["val"]
    number = _number_of_unwritten(value.dtype)
    with node.graph.inserting_after(node):
        filled = node.graph.call_function(aten.fill.Scalar, (node, number))
    with fakes.mode_of(value):
        filled.meta = {**node.meta, "val": value.new_empty_strided(value.shape, value.stride())}
    node.replace_all_uses_with(filled, delete_user_cb=lambda user: user is not filled)


def _number_of_unwritten(dtype: torch.dtype) -> float | bool:
    """What eager fills memory of a dtype with."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


PASS = Pass(
    "filled_memory",
    _run,
    "with `torch.use_deterministic_algorithms(True)`, elements that nobody wrote are NaN, or the greatest of their dtype",
)
