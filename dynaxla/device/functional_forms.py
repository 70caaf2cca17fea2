"""Ops whose call is captured as another one than their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from dynaxla.custom_ops import internal
from dynaxla.custom_ops.schema import default_of
from dynaxla.decompositions.eager_dtypes import call_as_eager
from dynaxla.decompositions.rnn_cells import RNN_CELL_DECOMPOSITIONS
from dynaxla.decompositions.rnn_layers import RNN_LAYER_DECOMPOSITIONS
from dynaxla.device.fused_optimizers import FUSED
from dynaxla.device.scalar_arguments import lift_scalars
from dynaxla.ops.table import core_table
from dynaxla.torch_api.mutation_schema import (
    count_out_parameters,
    find_functional_variant,
    find_returned_parameters,
    find_written_parameters,
    may_write_to_lazy,
    version_counter_of,
)
from dynaxla.torch_api.overloads import OpOverload, parameters, takes_sizes

aten = torch.ops.aten
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class FunctionalForm:
    """What is known of an op on the device.

    Attributes:
        op: the op.
        function: gives as results what the op gives and what it writes, behind each other; None if there is none.
        name: of the op, "aten.add.Tensor".
        names: of its parameters, in order.
        defaults: of its parameters, where they are not None.
        written: the parameters that it writes to.
        may_write_to_lazy: whether what it writes to may be conjugated or negated lazily.
        counted: who raises the versions of what it writes, as `version_counter_of`.
        outs: how many of the last parameters are there to be written to only.
        returned: for each of its results the parameter that it is, or None.
        lifts: the parameters, by position and by name, whose plain numbers are inputs of programs: those that are tensors to
            the schema, and a few others.
        on_tensors: what takes tensors of no dims for these others; None: the function itself.
        dtypes: those of tensors for which eager PyTorch has the op in whose place that runs; None: all.
        sizes: the parameters, by position and by name, that take sizes.
        from_host: the parameters, by position and by name, that may be tensors of the host which have dims: indices, and what
            `x[index] = values` copies.
    """

    op: OpOverload
    function: Callable[..., Any] | None
    name: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    written: tuple[str, ...]
    may_write_to_lazy: bool
    counted: Literal["torch", "parts", "nobody"]
    outs: int
    returned: tuple[str | None, ...]
    lifts: frozenset[int | str]
    on_tensors: Callable[..., Any] | None
    dtypes: frozenset[torch.dtype] | None
    sizes: frozenset[int | str]
    from_host: frozenset[int | str]

    @classmethod
    def of(cls, op: OpOverload) -> FunctionalForm:
        function, written = _forms().get(op, (None, find_written_parameters(op)))
        if function is None:
            function = find_functional_variant(op) if written else op
        schema = parameters(op)
        names = tuple(parameter.name for parameter in schema)
        rate = (frozenset({"lr"}), function) if op in FUSED else (frozenset[str](), None)
        lifting, on_tensors = lift_scalars().get(function, rate)
        tensors = {parameter.name for parameter in schema if str(parameter.type) in ("Tensor", "Optional[Tensor]")}
        sizes = {parameter.name for parameter in schema if takes_sizes(parameter)} | _BOUNDS.get(op, frozenset())
        placed = {"indices", "values"} if op.name().partition(".")[0] in _INDEXING else {"index"}
        defaults = {
            parameter.name: default_of(parameter) for parameter in schema if parameter.default_value is not None
        }
        record = (
            core_table().records.get(function) if on_tensors is not None and isinstance(function, OpOverload) else None
        )
        return cls(
            op,
            function,
            str(op),
            names,
            defaults,
            written,
            bool(written) and may_write_to_lazy(op),
            version_counter_of(op),
            count_out_parameters(op),
            find_returned_parameters(op),
            _places(names, lifting | tensors),
            on_tensors,
            None if record is None else record.dtypes,
            _places(names, sizes),
            _places(names, placed),
        )


def _places(names: Sequence[str], chosen: Set[str]) -> frozenset[int | str]:
    """The parameters of some names, by position and by name."""
    return frozenset(each for i, name in enumerate(names) if name in chosen for each in (i, name))


_INDEXING = frozenset(f"aten::{name}" for name in "index index_put index_put_ _index_put_impl_ _unsafe_index".split())
"""The ops that `x[...]` is."""

_BOUNDS: Mapping[OpOverload, frozenset[str]] = {
    op: frozenset(("start", "end")) for op in (aten.arange.default, aten.arange.start, aten.arange.start_step)
}
"""Sizes to which the schema has numbers."""


@cache
def _forms() -> Mapping[OpOverload, tuple[Callable[..., Any], tuple[str, ...]]]:
    """By op: a function in its place, and what it writes, of which the schema of a norm tells nothing."""
    return {
        aten.native_batch_norm.default: (_batch_norm, ("running_mean", "running_var")),
        aten._linalg_svd.default: (_svd, ()),
        aten._linalg_eigh.default: (_eigh, ()),
        aten.randperm.generator: (_randperm, ()),
        aten.conj_physical_.default: (aten._conj_physical.default, ("self",)),
        **{
            op: (function, ())
            for forms in (RNN_CELL_DECOMPOSITIONS, RNN_LAYER_DECOMPOSITIONS, EXPERTS)
            for op, function in forms.items()
        },
        **{op: (function, find_written_parameters(op)) for op, function in FUSED.items()},
    }


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if mean is None or var is None:
        return call_as_eager(aten._native_batch_norm_legit.no_stats, x, weight, bias, training, momentum, eps)
    if training:
        return call_as_eager(
            aten._native_batch_norm_legit_functional.default, x, weight, bias, mean, var, training, momentum, eps
        )
    inference = aten._native_batch_norm_legit_no_training.default
    return *call_as_eager(inference, x, weight, bias, mean, var, momentum, eps), mean, var


def _randperm(n: int, **options: Any) -> Tensor:
    """The seed is an input of the program, whichever generator it is of."""
    return aten.randperm.default(n, **options)  # type: ignore[no-any-return]


def _svd(x: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    """Where only the values are wanted, which do not depend on a library, the op is asked for nothing else."""
    left, values, right = aten._linalg_svd.default(x, full_matrices, compute_uv, driver=driver)
    return (left, values, right) if compute_uv else (x.new_zeros(0), values, x.new_zeros(0))


def _eigh(x: Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    values, vectors = aten._linalg_eigh.default(x, UPLO, compute_v)
    return values, vectors if compute_v else x.new_zeros(0)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of integers too, which eager on the host refuses."""
    if x.dtype not in _INTEGERS:
        return aten.histc.default(x, bins, min, max)  # type: ignore[no-any-return]
    if max < min:
        raise RuntimeError("torch.histc: max must be larger than min")
    flat = x.reshape(-1).to(torch.int64)
    low, high = flat.new_full((), int(min)), flat.new_full((), int(max))
    if int(min) == int(max) and flat.numel():
        low, high = flat.min(), flat.max()
    low, high = low - (low == high).long(), high + (low == high).long()
    inside = (flat >= low) & (flat <= high)
    place = torch.where(inside, (flat - low) * bins // (high - low), 0).clamp(max=bins - 1)
    return flat.new_zeros(bins).index_add(0, place, inside.long()).to(x.dtype)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows in groups times a matrix for each, or the products over each group's rows; torch captures these in bfloat16 alone.

    Others, and wrong ones, are left to the op.
    """
    plain = bias is None and left.dtype is right.dtype and left.dtype in _PRODUCTS and out_dtype in (None, left.dtype)
    if plain and offs is not None and offs.dtype is torch.int32 and offs.dim() == 1 and left.dim() == 2:
        if right.dim() == 3 and left.shape[1] == right.shape[1] and offs.shape[0] == right.shape[0]:
            return internal.GROUPED_PRODUCT(left, right, offs)  # type: ignore[no-any-return]
        if right.dim() == 2 and left.shape[1] == right.shape[0]:
            return internal.GROUP_PRODUCTS(left.t(), right, offs)  # type: ignore[no-any-return]
    return aten._grouped_mm.default(left, right, offs, bias, out_dtype)  # type: ignore[no-any-return]


EXPERTS: Mapping[Any, Callable[..., Any]] = {
    aten.histc.default: _histc,
    aten._grouped_mm.default: _grouped_product,
}
"""Ops that mixtures of experts call on accelerators: how many tokens each expert has, and products in groups. On the host
models call other ops for both: eager's kernels, or torch's capture, do not take there what accelerators do."""
