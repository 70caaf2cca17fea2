"""Which ops a program can compute, before anybody calls them."""

from __future__ import annotations

from collections.abc import Collection

import torch

from dynaxla.decompositions.decomposition_table import decomposition_table
from dynaxla.decompositions.random_draws import random_decompositions
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.ops.table import OpTable
from dynaxla.torch_api.overloads import OpOverload, gives_view, is_composite
from dynaxla.torch_api.private_device import aten_ops


def find_supported_ops(table: OpTable) -> list[OpOverload]:
    """The ops of ATen that are in the table or decomposed to such, and those that write what these give.

    Not among them: views, also those that a tensor becomes in place, which torch makes of `as_strided`, and what torch takes
    apart before autograd.
    """
    known: Collection[object] = {*table.records, *decomposition_table(), *random_decompositions()}
    return [op for op in aten_ops().values() if not _is_torchs(op) and _is_known(op, known)]


def _is_torchs(op: OpOverload) -> bool:
    return is_composite(op) or gives_view(op) or torch.Tag.inplace_view in op.tags


def _is_known(op: OpOverload, known: Collection[object]) -> bool:
    function = FunctionalForm.of(op).function
    return function is not None and (function in known or not isinstance(function, OpOverload))
