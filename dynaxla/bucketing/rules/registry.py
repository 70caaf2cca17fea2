"""The code of every pad rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dynaxla.bucketing.call import Call
from dynaxla.bucketing.rules import (
    attentions,
    backwards,
    elementwise,
    indexing,
    losses,
    normalizations,
    orders,
    pieces,
    products,
    reductions,
    scattering,
    views,
    window_backwards,
    windows,
)
from dynaxla.ops.spec import PadRule

Rule = Callable[[Call], Any]
"""Gives the padded result, or a tuple of results (None for one that cannot be had). Raises Refusal."""

RULES: Mapping[PadRule, Rule] = MappingProxyType(
    {
        PadRule.TRANSPARENT: elementwise.elementwise,
        PadRule.VIEW: views.view,
        PadRule.PERMUTE: views.permute,
        PadRule.UNSQUEEZE: views.unsqueeze,
        PadRule.SQUEEZE: views.squeeze,
        PadRule.EXPAND: views.expand,
        PadRule.SLICE: views.slice_,
        PadRule.SELECT: views.select,
        PadRule.SPLIT: pieces.split,
        PadRule.UNBIND: pieces.unbind,
        PadRule.REPEAT: pieces.repeat,
        PadRule.REDUCTION: reductions.reduction,
        PadRule.MEAN: reductions.mean,
        PadRule.VARIANCE: reductions.variance,
        PadRule.CUMULATIVE: orders.cumulative,
        PadRule.SOFTMAX: reductions.softmax,
        PadRule.SOFTMAX_BACKWARD: backwards.softmax_backward,
        PadRule.SORT: orders.sort,
        PadRule.TOPK: orders.topk,
        PadRule.KTH_VALUE: orders.kth_value,
        PadRule.MEDIAN: orders.median,
        PadRule.SEARCH: orders.search,
        PadRule.PRODUCT: products.product,
        PadRule.LINEAR: products.linear,
        PadRule.DISTANCES: products.distances,
        PadRule.LAYER_NORM: normalizations.layer_norm,
        PadRule.BATCH_NORM: normalizations.batch_norm,
        PadRule.BATCH_STATISTICS: normalizations.batch_statistics,
        PadRule.GROUP_NORM: normalizations.group_norm,
        PadRule.LOSS: losses.loss,
        PadRule.LOSS_BACKWARD: backwards.loss_backward,
        PadRule.NLL_LOSS: losses.nll_loss,
        PadRule.NLL_LOSS_BACKWARD: backwards.nll_loss_backward,
        PadRule.ATTENTION: attentions.attention,
        PadRule.ATTENTION_BACKWARD: attentions.attention_backward,
        PadRule.CONVOLUTION: windows.convolution,
        PadRule.CONVOLUTION_BACKWARD: window_backwards.convolution_backward,
        PadRule.MAX_POOL: windows.max_pool,
        PadRule.MAX_POOL_BACKWARD: window_backwards.max_pool_backward,
        PadRule.AVG_POOL_BACKWARD: window_backwards.avg_pool_backward,
        PadRule.POOL_PER_IMAGE_BACKWARD: window_backwards.pool_per_image_backward,
        PadRule.POOL_PER_IMAGE: windows.pool_per_image,
        PadRule.AVG_POOL: windows.avg_pool,
        PadRule.UNFOLD: windows.unfold,
        PadRule.UNFOLD_BACKWARD: backwards.unfold_backward,
        PadRule.EMBEDDING: indexing.embedding,
        PadRule.EMBEDDING_BACKWARD: backwards.embedding_backward,
        PadRule.GATHER: indexing.gather,
        PadRule.INDEX_SELECT: indexing.index_select,
        PadRule.INDEX: indexing.index,
        PadRule.CONCATENATE: indexing.concatenate,
        PadRule.GLU: pieces.glu,
        PadRule.GLU_BACKWARD: backwards.glu_backward,
        PadRule.DIAGONAL: pieces.diagonal,
        PadRule.DIAGONAL_BACKWARD: backwards.diagonal_backward,
        PadRule.STACK: pieces.stack,
        PadRule.ROLL: pieces.roll,
        PadRule.SELECT_SCATTER: scattering.select_scatter,
        PadRule.SLICE_SCATTER: scattering.slice_scatter,
        PadRule.SELECT_BACKWARD: backwards.select_backward,
        PadRule.SLICE_BACKWARD: backwards.slice_backward,
        PadRule.SCATTER: scattering.scatter,
        PadRule.INDEX_PUT: scattering.index_put,
        PadRule.PAD: indexing.pad,
        PadRule.FLIP: indexing.flip,
        PadRule.TRIANGLE: indexing.triangle,
        PadRule.CREATION: indexing.creation,
        PadRule.ARANGE: indexing.arange,
        PadRule.SCALAR: indexing.scalar_tensor,
    }
)
