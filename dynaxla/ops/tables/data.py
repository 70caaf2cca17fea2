"""Rows of the ops that move, choose, order, reduce or create data; their bodies are in lowering/jax_rules.

A dtype that eager PyTorch's own kernel refuses is not in a row, so that the user gets eager's own error.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dynaxla.ops.spec import Check, OpSpec, Support, default_of

aten = torch.ops.aten

MASK_DTYPES = (torch.bool, torch.uint8)
WHOLE_NUMBERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INEXACT = FLOATS | {torch.complex64, torch.complex128}
REAL_NUMBERS = WHOLE_NUMBERS | FLOATS
REAL = REAL_NUMBERS | {torch.bool}
NUMBERS = WHOLE_NUMBERS | INEXACT


def argument(node: torch.fx.Node, name: str) -> Any:
    """The value that `node` passes for the parameter `name` of its overload, or the schema's default."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise TypeError(f"{node} does not call an overload")
    for place, parameter in enumerate(target._schema.arguments):
        if parameter.name != name:
            continue
        if name in node.kwargs:
            return node.kwargs[name]
        if place < len(node.args) and not parameter.kwarg_only:
            return node.args[place]
        return default_of(parameter)
    raise KeyError(f"{target} has no parameter {name}")


def tensor_of(node: torch.fx.Node, name: str) -> torch.Tensor:
    """The fake tensor that stands for one argument."""
    value = argument(node, name)
    if not isinstance(value, torch.fx.Node):
        raise TypeError(f"{name} of {node} is not a tensor")
    tensor = value.meta["val"]
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} of {node} has no fake tensor")
    return tensor


def check_no_mask(node: torch.fx.Node) -> str | None:
    """Refuse a boolean mask as an index."""
    if any(index.dtype in MASK_DTYPES for _, index in _indices(node)):
        return "a boolean mask as an index gives a size that depends on the data"
    return None


def check_mask_of_one_value(node: torch.fx.Node) -> str | None:
    """Refuse a boolean mask unless it is the only index and one value goes to all its places."""
    indices = _indices(node)
    masks = [(place, index) for place, index in indices if index.dtype in MASK_DTYPES]
    if not masks:
        return None
    if len(indices) > 1:
        return "a boolean mask beside another index"
    x, values = tensor_of(node, "self"), tensor_of(node, "values")
    place, mask = masks[0]
    under = x.ndim - place - mask.ndim  # axes after those under the mask; one axis of values stands for all of these
    if values.ndim > under and values.shape[values.ndim - under - 1] != 1:
        return "as many values as the mask has true places: a number that depends on the data"
    return None


def _indices(node: torch.fx.Node) -> list[tuple[int, torch.Tensor]]:
    return [
        (place, index.meta["val"])
        for place, index in enumerate(argument(node, "indices"))
        if isinstance(index, torch.fx.Node)
    ]


def check_output_size(node: torch.fx.Node) -> str | None:
    """Refuse repeat_interleave without the size of its result."""
    if argument(node, "output_size") is None:
        return "without output_size the size of the result depends on the data"
    return None


def check_own_storage(node: torch.fx.Node) -> str | None:
    """Refuse a strided view of storage that the input does not fill, in row-major order."""
    x = tensor_of(node, "self")
    if not x.is_contiguous() or x.storage_offset() != 0:
        return "the input is itself a view whose storage is laid out in another way"
    size, stride = argument(node, "size"), argument(node, "stride")
    offset = argument(node, "storage_offset") or 0
    if not all(isinstance(number, int) for number in (*size, *stride, offset)):
        return "the view's sizes or distances vary"
    if math.prod(size) == 0:
        return None
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return None if last < x.numel() else "the view reaches storage beyond the input's own elements"


def check_fractions(node: torch.fx.Node) -> str | None:
    """Refuse evenly spaced integers."""
    dtype = argument(node, "dtype")
    is_whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return "integers are cut off from roundings that differ from one processor to the next" if is_whole else None


def check_index(node: torch.fx.Node) -> str | None:
    """Refuse an index for which torch raises: most take int64 alone."""
    short_too = node.target in (aten.index_select.default, aten.index_add.default)
    dtype = tensor_of(node, "index").dtype
    return None if dtype == torch.int64 or (short_too and dtype == torch.int32) else f"an index of {dtype}"


def check_mask(node: torch.fx.Node) -> str | None:
    """Refuse a mask that is not boolean."""
    dtype = tensor_of(node, "mask").dtype
    return None if dtype == torch.bool else f"a mask of {dtype}"


def _rows(
    *targets: torch._ops.OpOverload,
    limits: str = "",
    check: Check | None = None,
    dtypes: frozenset[torch.dtype] | None = None,
) -> tuple[OpSpec, ...]:
    return tuple(OpSpec(target, Support.JAX, check=check, dtypes=dtypes, limits=limits) for target in targets)


OUT_OF_RANGE_READ = "an index out of range, for which torch raises, reads some element of the tensor"
OUT_OF_RANGE_WRITE = "an index out of range, for which torch raises, is dropped"
TIES = "which of several equal elements the index points at is as open as in torch"
NO_MASK = "no boolean masks; " + OUT_OF_RANGE_READ
OWN_STORAGE = "the input is contiguous and fills its storage from offset 0"

INDEXING = (
    *_rows(
        aten.gather.default,
        aten.take.default,
        aten._unsafe_masked_index.default,
        limits=OUT_OF_RANGE_READ,
    ),
    *_rows(aten.index_select.default, check=check_index, limits=OUT_OF_RANGE_READ),
    *_rows(aten.index.Tensor, aten._unsafe_index.Tensor, check=check_no_mask, limits=NO_MASK),
    *_rows(
        aten.index_put.default,
        aten._unsafe_index_put.default,
        check=check_mask_of_one_value,
        limits="a boolean mask only alone and with one value; " + OUT_OF_RANGE_WRITE,
    ),
    *_rows(
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.index_reduce.default,
        aten._unsafe_masked_index_put_accumulate.default,
        limits=OUT_OF_RANGE_WRITE,
    ),
    *_rows(
        aten.index_add.default,
        aten.index_copy.default,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor,
        aten.put.default,
        check=check_index,
        limits=OUT_OF_RANGE_WRITE,
    ),
    *_rows(
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.diagonal_scatter.default,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.diagonal_backward.default,
        aten.unfold_backward.default,
        aten.nonzero_static.default,
        aten.tril_indices.default,
        aten.triu_indices.default,
    ),
    *_rows(aten.searchsorted.Tensor, aten.bucketize.Tensor, dtypes=REAL_NUMBERS),
    *_rows(aten.searchsorted.Scalar, aten.bucketize.Scalar, dtypes=REAL),
    *_rows(aten.masked_scatter_backward.default),
    *_rows(
        aten.masked_scatter.default,
        check=check_mask,
        limits="a source with too few elements, for which torch raises, is not seen",
    ),
    *_rows(aten.as_strided_scatter.default, check=check_own_storage, limits=OWN_STORAGE),
    *_rows(
        aten.histc.default, limits="a range taken from data with infinities or NaN, for which torch raises, is not seen"
    ),
    *_rows(aten.repeat_interleave.Tensor, check=check_output_size, limits="only with output_size"),
)

ORDERING = (
    *_rows(
        aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.msort.default,
        aten.max.dim, aten.min.dim, aten.aminmax.default, aten._aminmax.default, aten._aminmax.dim,
        dtypes=REAL,
    ),
    *_rows(
        aten.argmax.default, aten.argmin.default, aten.median.default, aten.nanmedian.default, dtypes=REAL_NUMBERS
    ),
    *_rows(
        aten.mode.default,
        dtypes=REAL,
        limits="in a row with NaN torch's own answer depends on the order of the elements",
    ),
    *_rows(aten.topk.default, aten.kthvalue.default, dtypes=REAL_NUMBERS, limits=TIES),
    *_rows(aten.median.dim, aten.nanmedian.dim, dtypes=REAL_NUMBERS, limits=TIES),
)  # fmt: skip

REDUCTIONS = (
    *_rows(
        aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.prod.default, aten.prod.dim_int,
        aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
        aten.logsumexp.default, aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim,
        aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype, aten.dist.default, aten.count_nonzero.default,
        aten.count_nonzero.dim_IntList,
    ),
    *_rows(
        aten.nansum.default, aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, dtypes=REAL
    ),
    *_rows(aten.trace.default, dtypes=NUMBERS),
    *_rows(
        aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, dtypes=INEXACT
    ),
    *_rows(
        aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default,
        aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
        dtypes=FLOATS,
    ),
)  # fmt: skip

LOSSES = (
    *_rows(
        aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, aten.nll_loss_backward.default,
        aten.nll_loss2d_backward.default,
        limits="a class out of range, for which torch raises, counts as ignored",
    ),
    *_rows(
        aten.binary_cross_entropy.default,
        dtypes=FLOATS,
        limits="input outside 0 to 1, for which torch raises, is not seen",
    ),
    *_rows(
        aten.binary_cross_entropy_backward.default, aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default,
        aten.huber_loss.default, aten.huber_loss_backward.default,
        dtypes=FLOATS,
    ),
    *_rows(
        aten.binary_cross_entropy_with_logits.default, aten.mse_loss.default, aten.mse_loss_backward.default,
        dtypes=REAL,
    ),
    *_rows(aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default, dtypes=INEXACT),
)  # fmt: skip

CUMULATIVE = (
    *_rows(aten.cumsum.default, aten.cumprod.default),
    *_rows(aten.cummax.default, aten.cummin.default, dtypes=REAL),
    *_rows(aten.logcumsumexp.default, dtypes=FLOATS, limits="no complex input"),
)

CREATION = (
    *_rows(
        aten.full.default, aten.zeros.default, aten._efficientzerotensor.default, aten.ones.default,
        aten.full_like.default, aten.zeros_like.default,
        aten.ones_like.default, aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
        aten.scalar_tensor.default, aten.eye.default, aten.eye.m, aten.arange.default, aten.arange.start,
        aten.arange.start_step, aten.tril.default, aten.triu.default, aten.hann_window.default,
        aten.hann_window.periodic, aten.hamming_window.default, aten.hamming_window.periodic,
        aten.hamming_window.periodic_alpha, aten.hamming_window.periodic_alpha_beta, aten.blackman_window.default,
        aten.blackman_window.periodic, aten.bartlett_window.default, aten.bartlett_window.periodic,
        aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta,
    ),
    *_rows(
        aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor,
        aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor,
        check=check_fractions,
        limits="no integers; in a 16-bit float equal to one rounding of the largest value",
    ),
    *_rows(
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
        aten.new_empty_strided.default, aten.empty_permuted.default,
        limits="gives zeros",
    ),
)  # fmt: skip

VIEWS = (
    *_rows(
        aten.alias.default, aten.alias_copy.default, aten.detach.default, aten.detach_copy.default, aten.lift.default,
        aten.lift_fresh.default, aten.lift_fresh_copy.default, aten._neg_view.default,
        aten._conj.default, aten._conj_copy.default, aten.view.default, aten.view_copy.default, aten.reshape.default,
        aten._unsafe_view.default, aten._reshape_copy.default, aten._reshape_alias.default, aten.view.dtype,
        aten.view_copy.dtype, aten.view_as_real.default, aten.view_as_real_copy.default, aten.view_as_complex.default,
        aten.view_as_complex_copy.default, aten.expand.default, aten.expand_copy.default, aten.permute.default,
        aten.permute_copy.default, aten.transpose.int, aten.transpose_copy.int, aten.t.default, aten.t_copy.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.default, aten.squeeze_copy.dim,
        aten.squeeze_copy.dims, aten.unsqueeze.default, aten.unsqueeze_copy.default, aten.select.int,
        aten.select_copy.int, aten.slice.Tensor, aten.slice_copy.Tensor, aten.narrow_copy.default, aten.cat.default,
        aten.stack.default, aten._stack.default, aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor,
        aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default,
        aten.unbind.int, aten.unbind_copy.int, aten.repeat.default, aten.flip.default, aten.roll.default,
        aten.rot90.default, aten.unfold.default, aten.unfold_copy.default, aten.diagonal.default,
        aten.diagonal_copy.default, aten.diag_embed.default, aten.block_diag.default,
    ),
    *_rows(aten._neg_view_copy.default, dtypes=NUMBERS),
    *_rows(aten.as_strided.default, aten.as_strided_copy.default, check=check_own_storage, limits=OWN_STORAGE),
)  # fmt: skip

ROWS: tuple[OpSpec, ...] = (*INDEXING, *ORDERING, *REDUCTIONS, *LOSSES, *CUMULATIVE, *CREATION, *VIEWS)
