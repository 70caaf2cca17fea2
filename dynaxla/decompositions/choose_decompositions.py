"""Chooses which ops AOTAutograd decomposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from dynaxla.decompositions.affine_grids import derive_affine_grids
from dynaxla.decompositions.assertions import capture_factorization_checks, check_first
from dynaxla.decompositions.decomposition_table import decomposition_table, decompositions_but_strides
from dynaxla.decompositions.flex_attention import replace_flex_attention
from dynaxla.decompositions.fused_attention import replace_attention
from dynaxla.decompositions.image_sizes import keep_resizes_whole, pool_images_by_mean
from dynaxla.decompositions.margin_losses import replace_margin_losses
from dynaxla.decompositions.mask_writes import replace_mask_gradients
from dynaxla.decompositions.quantized import quantized_decompositions
from dynaxla.decompositions.random_draws import random_decompositions
from dynaxla.decompositions.rnn_layers import replace_rnn_layers
from dynaxla.ops.table import OpTable, core_table
from dynaxla.torch_api.fakes import captured_value
from dynaxla.torch_api.overloads import OpOverload

Decompose = Callable[..., Any]


@contextmanager
def replace_composites() -> Iterator[None]:
    """Context of a trace, in which ops that torch takes apart before it consults a table are made of others, or stay whole."""
    with (
        keep_resizes_whole(),
        pool_images_by_mean(),
        derive_affine_grids(),
        replace_margin_losses(),
        replace_mask_gradients(),
        replace_rnn_layers(),
        replace_attention(),
        replace_flex_attention(),
        capture_factorization_checks(),
    ):
        yield


def has_jagged_values(module: GraphModule) -> bool:
    """Whether a graph of Dynamo's computes with jagged tensors. AOTAutograd counts the sizes of those that it returns before
    anything is decomposed: a stride that then varies is one more, and is taken for a gradient."""
    values = map(captured_value, module.graph.nodes)
    return any(isinstance(value, Tensor) and value.is_nested for value in values)


class GraphDecompositions(Mapping[OpOverload, Decompose]):
    """The decompositions of a graph: those of random ops only if `rng` is "compiled", none of ops with a body of the user's.

    They are chosen when AOTAutograd traces: a capture that is found on disk needs none.

    Args:
        table: the records of the graph's ops.
        rng: the option.
        gives_strides: whether results get eager's strides where torch predicts others.
    """

    def __init__(self, table: OpTable, rng: str, *, gives_strides: bool = True) -> None:
        self._table = table
        self._rng = rng
        self._gives_strides = gives_strides

    @cached_property
    def _chosen(self) -> dict[OpOverload, Decompose]:
        rules, own = self._table.bodies, core_table().bodies
        known = decomposition_table() if self._gives_strides else decompositions_but_strides()
        available = {**known, **quantized_decompositions()}
        if self._rng == "compiled":
            available = {**available, **random_decompositions()}
        return {op: check_first(op, rewrite) for op, rewrite in available.items() if rules.get(op) is own.get(op)}

    def __getitem__(self, op: OpOverload) -> Decompose:
        return self._chosen[op]

    def __iter__(self) -> Iterator[OpOverload]:
        return iter(self._chosen)

    def __len__(self) -> int:
        return len(self._chosen)
