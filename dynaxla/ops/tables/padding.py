"""What each op does to padding: the pad rule of every overload that has one. Pointwise ops need no row: torch tags them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch._ops import OpOverload

from dynaxla.ops import internal
from dynaxla.ops.random import RANDOM
from dynaxla.ops.spec import PadRule

aten = torch.ops.aten

_FAMILIES: Mapping[PadRule, tuple[OpOverload, ...]] = {
    PadRule.TRANSPARENT: (
        aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.where.self,
        aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.masked_fill.Scalar,
        aten.masked_fill.Tensor, aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default,
        aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.floor_divide.default, aten.floor_divide.Scalar,
        aten.rsub.Tensor, aten.hardswish.default, aten.alias_copy.default, aten.detach_copy.default,
        aten.elu_backward.default, aten.hardshrink_backward.default, aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default,
        aten.mish_backward.default, aten.softplus_backward.default, aten.softshrink_backward.default,
        aten.complex.default, aten._prelu_kernel.default, aten.polar.default, aten._prelu_kernel_backward.default,
        aten.rrelu_with_noise_backward.default, aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default,
        aten._conj.default, aten._conj_copy.default, aten._neg_view.default, aten._neg_view_copy.default,
    ),
    PadRule.VIEW: (
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default,
        aten._reshape_copy.default,
    ),
    PadRule.PERMUTE: (
        aten.permute.default, aten.transpose.int, aten.t.default,
        aten.permute_copy.default, aten.transpose_copy.int, aten.t_copy.default,
    ),
    PadRule.UNSQUEEZE: (aten.unsqueeze.default, aten.unsqueeze_copy.default),
    PadRule.SQUEEZE: (
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims,
    ),
    PadRule.EXPAND: (aten.expand.default, aten.expand_copy.default),
    PadRule.SLICE: (aten.slice.Tensor, aten.slice_copy.Tensor),
    PadRule.SELECT: (aten.select.int, aten.select_copy.int),
    PadRule.SPLIT: (
        aten.split_with_sizes.default, aten.split.Tensor, aten.split_copy.Tensor, aten.split_with_sizes_copy.default,
        aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    ),
    PadRule.UNBIND: (aten.unbind.int, aten.unbind_copy.int),
    PadRule.REPEAT: (aten.repeat.default,),
    PadRule.REDUCTION: (
        aten.sum.dim_IntList, aten.sum.default, aten.nansum.default, aten.prod.dim_int, aten.prod.default,
        aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.max.default, aten.min.default,
        aten.argmax.default, aten.argmin.default, aten.any.default, aten.any.dim, aten.any.dims, aten.all.default,
        aten.all.dim, aten.all.dims, aten.logsumexp.default, aten.linalg_vector_norm.default,
        aten.count_nonzero.dim_IntList, aten.count_nonzero.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim,
        aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype,
    ),
    PadRule.MEAN: (aten.mean.dim, aten.mean.default),
    PadRule.VARIANCE: (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction),
    PadRule.CUMULATIVE: (
        aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default,
        aten.logcumsumexp.default,
    ),
    PadRule.SOFTMAX: (aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default),
    PadRule.SOFTMAX_BACKWARD: (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
    PadRule.SORT: (aten.sort.stable, aten.sort.default),
    PadRule.TOPK: (aten.topk.default,),
    PadRule.KTH_VALUE: (aten.kthvalue.default,),
    PadRule.MEDIAN: (aten.median.dim, aten.median.default),
    PadRule.SEARCH: (aten.bucketize.Tensor, aten.searchsorted.Tensor),
    PadRule.DISTANCES: (aten._cdist_forward.default,),
    PadRule.PRODUCT: (
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default,
        aten.addmv.default, aten.dot.default, aten._int_mm.default,
    ),
    PadRule.DISTANCES_BACKWARD: (aten._cdist_backward.default,),
    PadRule.SQUARE_MATRIX: (
        aten.linalg_cholesky_ex.default, aten.cholesky_inverse.default, aten.linalg_matrix_exp.default,
    ),
    PadRule.SOLVE: (
        aten.cholesky_solve.default, aten.linalg_solve_triangular.default, aten.triangular_solve.default,
    ),
    PadRule.CROSS: (aten.linalg_cross.default,),
    PadRule.TRILINEAR: (aten._trilinear.default,),
    PadRule.LINEAR: (internal.LINEAR,),
    PadRule.LAYER_NORM: (
        aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.rms_norm.default,
    ),
    PadRule.BATCH_NORM: (aten._native_batch_norm_legit_no_training.default,),
    PadRule.BATCH_STATISTICS: (
        aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default,
    ),
    PadRule.GROUP_NORM: (aten.native_group_norm.default,),
    PadRule.LOSS: (
        aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    ),
    PadRule.LOSS_BACKWARD: (
        aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
        aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
    ),
    PadRule.NLL_LOSS: (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
    PadRule.NLL_LOSS_BACKWARD: (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default),
    PadRule.ATTENTION: (
        aten._scaled_dot_product_flash_attention_for_cpu.default, internal.ATTENTION,
        aten._scaled_dot_product_attention_math.default,
    ),
    PadRule.ATTENTION_BACKWARD: (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, internal.ATTENTION_BACKWARD,
    ),
    PadRule.CONVOLUTION: (aten.convolution.default, internal.CONVOLUTION),
    PadRule.KERNEL: (internal.KERNEL,),
    PadRule.CONVOLUTION_BACKWARD: (aten.convolution_backward.default,),
    PadRule.MAX_POOL: (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default),
    PadRule.RESIZE: (
        aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default, aten.upsample_nearest2d.vec,
        aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.default,
        aten.upsample_nearest1d.default,
        aten.upsample_nearest3d.default, aten.upsample_linear1d.default, aten.upsample_trilinear3d.default,
        aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
        aten._upsample_nearest_exact3d.default, aten._upsample_bilinear2d_aa.default,
        aten._upsample_bicubic2d_aa.default,
    ),
    PadRule.ADAPTIVE_POOL: (
        aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool3d.default,
    ),
    PadRule.MAX_POOL_BACKWARD: (
        aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
    ),
    PadRule.AVG_POOL_BACKWARD: (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default),
    PadRule.ADAPTIVE_POOL_BACKWARD: (
        aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default,
        aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default,
    ),
    PadRule.RESIZE_BACKWARD: (
        aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
        aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact1d_backward.default,
        aten._upsample_nearest_exact2d_backward.default, aten._upsample_nearest_exact3d_backward.default,
        aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default,
        aten.upsample_bicubic2d_backward.default, aten.upsample_trilinear3d_backward.default,
    ),
    PadRule.REPEATED_EDGES_BACKWARD: (
        aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default,
        aten.reflection_pad3d_backward.default, aten.replication_pad1d_backward.default,
        aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default,
    ),
    PadRule.AVG_POOL: (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default),
    PadRule.SAMPLE: (aten.grid_sampler_2d.default, aten.grid_sampler_3d.default),
    PadRule.SAMPLE_BACKWARD: (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default),
    PadRule.UNFOLD: (aten.unfold.default, aten.unfold_copy.default),
    PadRule.UNFOLD_BACKWARD: (aten.unfold_backward.default,),
    PadRule.COLUMNS: (aten.im2col.default,),
    PadRule.EMBEDDING: (aten.embedding.default,),
    PadRule.EMBEDDING_BACKWARD: (aten.embedding_dense_backward.default,),
    PadRule.GATHER: (aten.gather.default,),
    PadRule.INDEX_SELECT: (aten.index_select.default,),
    PadRule.INDEX: (aten.index.Tensor, aten._unsafe_index.Tensor),
    PadRule.CONCATENATE: (aten.cat.default,),
    PadRule.GLU: (aten.glu.default,),
    PadRule.GLU_BACKWARD: (aten.glu_backward.default,),
    PadRule.DIAGONAL: (aten.diagonal.default, aten.diagonal_copy.default),
    PadRule.DIAGONAL_BACKWARD: (aten.diagonal_backward.default,),
    PadRule.DIAGONAL_SCATTER: (aten.diagonal_scatter.default,),
    PadRule.DIAG_EMBED: (aten.diag_embed.default,),
    PadRule.TRACE: (aten.trace.default,),
    PadRule.STACK: (aten.stack.default, aten._stack.default),
    PadRule.ROLL: (aten.roll.default,),
    PadRule.SELECT_SCATTER: (aten.select_scatter.default,),
    PadRule.SLICE_SCATTER: (aten.slice_scatter.default,),
    PadRule.SELECT_BACKWARD: (aten.select_backward.default,),
    PadRule.SLICE_BACKWARD: (aten.slice_backward.default,),
    PadRule.SCATTER: (
        aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
        aten.scatter_reduce.two, aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor, aten.index_reduce.default,
    ),
    PadRule.INDEX_PUT: (aten.index_put.default, aten._unsafe_index_put.default),
    PadRule.PAD: (aten.constant_pad_nd.default,),
    PadRule.REPEATED_EDGES: (
        aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
        aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default,
    ),
    PadRule.FLIP: (aten.flip.default,),
    PadRule.TURN: (aten.rot90.default,),
    PadRule.TRIANGLE: (aten.tril.default, aten.triu.default),
    PadRule.CREATION: (
        aten.full.default, aten.zeros.default, aten._efficientzerotensor.default, aten.ones.default,
        aten.empty.memory_format, aten.full_like.default,
        aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.new_full.default,
        aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_empty_strided.default,
        aten.empty_strided.default, aten.empty_permuted.default,
    ),
    PadRule.ARANGE: (aten.arange.default, aten.arange.start, aten.arange.start_step),
    PadRule.LINSPACE: (aten.linspace.default,),
    PadRule.DRAW: (RANDOM,),
    PadRule.EYE: (aten.eye.default, aten.eye.m),
    PadRule.SCALAR: (aten.scalar_tensor.default,),
    PadRule.AS_PAIRS: (aten.view_as_real.default, aten.view_as_real_copy.default),
    PadRule.FROM_PAIRS: (aten.view_as_complex.default, aten.view_as_complex_copy.default),
    PadRule.AS_STRIDED: (aten.as_strided.default, aten.as_strided_copy.default, internal.GATHER_STRIDED),
    PadRule.FOURIER: (aten._fft_c2c.default,),
    PadRule.FOURIER_OF_REAL: (aten._fft_r2c.default,),
    PadRule.FOURIER_TO_REAL: (aten._fft_c2r.default,),
    PadRule.BAG: (aten._embedding_bag.default, aten._embedding_bag_forward_only.default),
    PadRule.GROUPED_PRODUCT: (aten._grouped_mm.default, internal.GROUPED_PRODUCT),
    PadRule.GROUP_PRODUCTS: (internal.GROUP_PRODUCTS,),
    PadRule.HISTOGRAM: (aten.histc.default,),
}  # fmt: skip

PAD_RULES: Mapping[OpOverload, PadRule] = MappingProxyType(
    {target: rule for rule, targets in _FAMILIES.items() for target in targets}
)


def pad_rule(target: OpOverload, rules: Mapping[OpOverload, PadRule] = PAD_RULES) -> PadRule | None:
    """What the op does to padding, by these rules; None if that is not known."""
    found = rules.get(target)
    if found is None and torch.Tag.pointwise in target.tags:
        return PadRule.TRANSPARENT
    return found
