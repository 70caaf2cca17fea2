"""The code of every pad rule."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch._ops import OpOverload

from dynaxla.bucketing.arguments import Rule, check, takes
from dynaxla.bucketing.call import Call
from dynaxla.bucketing.rules import (
    adaptive,
    attentions,
    backwards,
    diagonals,
    draws,
    edges,
    elementwise,
    grids,
    groups,
    image_gradients,
    indexing,
    losses,
    matrices,
    normalizations,
    orders,
    pieces,
    products,
    reductions,
    resampling,
    scattering,
    spectral,
    views,
    window_backwards,
    windows,
)
from dynaxla.bucketing.values import Refusal
from dynaxla.ops.spec import PadRule
from dynaxla.ops.tables.padding import PAD_RULES, pad_rule

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
        PadRule.DISTANCES_BACKWARD: products.distances_backward,
        PadRule.SQUARE_MATRIX: matrices.square_matrix,
        PadRule.SOLVE: matrices.solve,
        PadRule.CROSS: matrices.cross,
        PadRule.TRILINEAR: matrices.trilinear,
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
        PadRule.KERNEL: windows.kernel,
        PadRule.CONVOLUTION_BACKWARD: window_backwards.convolution_backward,
        PadRule.MAX_POOL: windows.max_pool,
        PadRule.MAX_POOL_BACKWARD: window_backwards.max_pool_backward,
        PadRule.AVG_POOL_BACKWARD: window_backwards.avg_pool_backward,
        PadRule.ADAPTIVE_POOL_BACKWARD: image_gradients.adaptive_pool_backward,
        PadRule.RESIZE_BACKWARD: image_gradients.upsample_backward,
        PadRule.REPEATED_EDGES_BACKWARD: image_gradients.repeated_edges_backward,
        PadRule.RESIZE: resampling.upsample,
        PadRule.AVG_POOL: windows.avg_pool,
        PadRule.ADAPTIVE_POOL: adaptive.adaptive_pool,
        PadRule.SAMPLE: grids.sample,
        PadRule.SAMPLE_BACKWARD: grids.sample_backward,
        PadRule.UNFOLD: windows.unfold,
        PadRule.COLUMNS: windows.columns,
        PadRule.UNFOLD_BACKWARD: backwards.unfold_backward,
        PadRule.EMBEDDING: indexing.embedding,
        PadRule.EMBEDDING_BACKWARD: backwards.embedding_backward,
        PadRule.GATHER: indexing.gather,
        PadRule.INDEX_SELECT: indexing.index_select,
        PadRule.INDEX: indexing.index,
        PadRule.CONCATENATE: indexing.concatenate,
        PadRule.GLU: pieces.glu,
        PadRule.GLU_BACKWARD: backwards.glu_backward,
        PadRule.DIAGONAL: diagonals.diagonal,
        PadRule.DIAGONAL_BACKWARD: diagonals.diagonal_backward,
        PadRule.DIAGONAL_SCATTER: diagonals.diagonal_scatter,
        PadRule.DIAG_EMBED: diagonals.diag_embed,
        PadRule.TRACE: diagonals.trace,
        PadRule.STACK: pieces.stack,
        PadRule.ROLL: pieces.roll,
        PadRule.SELECT_SCATTER: scattering.select_scatter,
        PadRule.SLICE_SCATTER: scattering.slice_scatter,
        PadRule.SELECT_BACKWARD: backwards.select_backward,
        PadRule.SLICE_BACKWARD: backwards.slice_backward,
        PadRule.SCATTER: scattering.scatter,
        PadRule.INDEX_PUT: scattering.index_put,
        PadRule.PAD: edges.pad,
        PadRule.REPEATED_EDGES: edges.repeated_edges,
        PadRule.FLIP: indexing.flip,
        PadRule.TURN: indexing.turn,
        PadRule.TRIANGLE: diagonals.triangle,
        PadRule.CREATION: indexing.creation,
        PadRule.ARANGE: indexing.arange,
        PadRule.LINSPACE: indexing.linspace,
        PadRule.DRAW: draws.draw,
        PadRule.EYE: indexing.eye,
        PadRule.SCALAR: indexing.scalar_tensor,
        PadRule.AS_PAIRS: views.as_pairs,
        PadRule.FROM_PAIRS: views.from_pairs,
        PadRule.AS_STRIDED: views.as_strided,
        PadRule.FOURIER: spectral.transform,
        PadRule.FOURIER_OF_REAL: spectral.transform_real,
        PadRule.FOURIER_TO_REAL: spectral.transform_to_real,
        PadRule.BAG: groups.bag,
        PadRule.GROUPED_PRODUCT: groups.grouped_product,
        PadRule.GROUP_PRODUCTS: groups.group_products,
        PadRule.HISTOGRAM: groups.histogram,
    }
)

check(RULES, PAD_RULES)


@takes()
def NO_RULE(call: Call) -> Any:
    raise Refusal("it has no rule for padded values")


def rule_of(target: OpOverload, names: Mapping[OpOverload, PadRule] = PAD_RULES) -> Rule:
    """The rule of an op; of one that has none a rule that refuses.

    Args:
        target: the op.
        names: which rule each op has.
    """
    name = pad_rule(target, names)
    return NO_RULE if name is None else RULES[name]
