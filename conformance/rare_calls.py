"""Calls of ATen overloads that neither PyTorch's samples call nor a schema suffices to make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dynaxla.custom_ops import internal
from dynaxla.custom_ops.dynamic_slice import WINDOW, WINDOW_SCATTER
from dynaxla.custom_ops.recurrence import RECURRENCE, RECURRENCE_BACKWARD
from dynaxla.custom_ops.threefry import RANDOM
from dynaxla.ops.sampling import CHOOSE, FLOAT_COLUMNS, INT_COLUMNS

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)
EVERY = (*FLOATS, torch.int64, torch.int32, torch.bool)
aten = torch.ops.aten

Draw = Callable[..., Tensor]
Arguments = tuple[Any, ...]


def rare_calls(wanted: Collection[OpOverload]) -> Iterator[tuple[OpOverload, Arguments]]:
    """Calls of those of the wanted overloads that are made nowhere else; arguments by name are in a mapping behind."""
    for target, (dtypes, make) in _MAKERS.items():
        for dtype in dtypes if target in wanted else ():
            generator = torch.Generator().manual_seed(3)

            def draw(*sizes: int, dtype: torch.dtype = dtype, generator: torch.Generator = generator) -> Tensor:
                return (torch.randn(sizes, generator=generator) * 2).to(dtype)

            yield from ((target, args) for args in make(draw))


def _square(draw: Draw) -> Iterator[Arguments]:
    for sizes in ((3, 3), (2, 4, 4), (1, 1)):
        yield (_definite(draw, *sizes),)


def _definite(draw: Draw, *sizes: int) -> Tensor:
    half = draw(*sizes)
    return half @ half.mT + torch.eye(sizes[-1], dtype=half.dtype)


def _windows(*more: float) -> Callable[[Draw], Iterator[Arguments]]:
    def make(draw: Draw) -> Iterator[Arguments]:
        for length in (1, 2, 7, 16):
            yield length, *more, {"dtype": draw(1).dtype}
            if more == (False,):
                yield length, True, {"dtype": draw(1).dtype}

    return make


def _frequencies(draw: Draw) -> Iterator[Arguments]:
    for length, step in ((1, 1.0), (6, 0.5), (7, 0.1)):
        yield length, step, {"dtype": draw(1).dtype}


def _antialiased(draw: Draw) -> Iterator[Arguments]:
    for size, aligned in itertools.product(((3, 5), (9, 8), (4, 4)), (True, False)):
        yield draw(2, 3, 6, 7), list(size), aligned


def _antialiased_backward(draw: Draw) -> Iterator[Arguments]:
    for size, aligned in itertools.product(((3, 5), (9, 8), (4, 4)), (True, False)):
        yield draw(2, 3, *size), list(size), [2, 3, 6, 7], aligned


def _batch_norm(draw: Draw) -> Iterator[Arguments]:
    for sizes in ((4, 3), (2, 3, 5, 4)):
        for scaled in (True, False):
            yield (
                draw(*sizes), *((draw(3), draw(3)) if scaled else (None, None)), draw(3), draw(3).abs(), 0.1, 1e-5,
            )  # fmt: skip


def _batch_norm_functional(draw: Draw) -> Iterator[Arguments]:
    for *operands, momentum, eps in _batch_norm(draw):
        yield *operands, True, momentum, eps
        yield *operands, False, momentum, eps


def _rms_norm(draw: Draw) -> Iterator[Arguments]:
    for sizes, eps in (((4, 5), 1e-5), ((2, 3, 8), None)):
        yield draw(*sizes), [sizes[-1]], draw(sizes[-1]), eps
        yield draw(*sizes), [sizes[-1]], None, eps


def _addmm_activation(draw: Draw) -> Iterator[Arguments]:
    for gelu in (True, False):
        yield draw(4), draw(3, 5), draw(5, 4), {"use_gelu": gelu}
        yield draw(3, 4), draw(3, 5), draw(5, 4), {"use_gelu": gelu, "alpha": 0.5, "beta": 2}


def _scaled_sums(*shapes: tuple[int, ...]) -> Callable[[Draw], Iterator[Arguments]]:
    """Of scales with fractions, which eager cuts off for whole numbers, and with NaN and infinity where they are ignored."""

    def make(draw: Draw) -> Iterator[Arguments]:
        operands = tuple(draw(*shape) for shape in shapes)
        yield *operands, {"beta": 2.5, "alpha": 1.5}
        for value in (math.nan, math.inf) if operands[0].is_floating_point() else ():
            yield torch.full_like(operands[0], value), *operands[1:], {"beta": 0}
            yield torch.full_like(operands[0], value), *operands[1:], {"beta": 0.0, "alpha": 0.5}

    return make


def _lerped(draw: Draw) -> Iterator[Arguments]:
    """One end is infinite or NaN where the weight is that of the other."""
    for value in (math.nan, math.inf):
        ends = draw(3, 4), torch.full((3, 4), value, dtype=draw(1).dtype)
        yield from ((*ends, 0.0), (*reversed(ends), 1.0))


def _indexed(draw: Draw) -> Iterator[Arguments]:
    yield draw(4, 3), [torch.tensor([0, -1, 2])]
    yield draw(4, 3), [None, torch.tensor([[0, 1], [2, 2]])]
    yield draw(4, 3), [torch.tensor([3, 1]), torch.tensor([0, -3])]


def _index_put(draw: Draw) -> Iterator[Arguments]:
    for accumulate in (True, False):
        yield draw(4, 3), [torch.tensor([0, -1, 2])], draw(3, 3), accumulate
        yield draw(4, 3), [torch.tensor([3, 1]), torch.tensor([0, -3])], draw(2), accumulate


def _norms(draw: Draw) -> Iterator[Arguments]:
    for order in (1, 2, 0.5, float("inf")):
        yield draw(3, 4), order, {"dtype": torch.float64}
    yield draw(3, 4), None, {"dtype": torch.float32}


def _norms_of_dims(draw: Draw) -> Iterator[Arguments]:
    for order, keepdim in itertools.product((1, 2, 0.5, float("inf")), (True, False)):
        yield draw(3, 4), order, [1], keepdim, {"dtype": torch.float64}
    yield draw(3, 4), 2, [0, 1], False, {"dtype": torch.float32}


def _reshaped(draw: Draw) -> Iterator[Arguments]:
    for sizes in ([12], [2, 6], [3, 2, -1], [1, 12, 1]):
        yield draw(3, 4), sizes


def _reshape_alias(draw: Draw) -> Iterator[Arguments]:
    yield draw(3, 4), [12], [1]
    yield draw(3, 4), [2, 6], [6, 1]


def _split(draw: Draw) -> Iterator[Arguments]:
    for size, dim in ((2, 0), (2, 1), (3, -1)):
        yield draw(5, 4), size, dim


def _split_sizes(draw: Draw) -> Iterator[Arguments]:
    for sizes, dim in (([2, 3], 0), ([1, 2, 1], 1), ([4], -1)):
        yield draw(5, 4), sizes, dim


def _of_dim(draw: Draw) -> Iterator[Arguments]:
    for dim, keepdim in itertools.product((0, 1, -1), (True, False)):
        yield draw(5, 4), dim, keepdim


def _squeezed(draw: Draw) -> Iterator[Arguments]:
    for dims in ([0], [0, 2], [-1, 1], []):
        yield draw(1, 4, 1), dims


def _selected(draw: Draw) -> Iterator[Arguments]:
    for dim, index in ((0, 0), (1, -1), (-1, 2)):
        yield draw(5, 4), dim, index


def _stacked(draw: Draw) -> Iterator[Arguments]:
    for dim in (0, 1, -1):
        yield [draw(2, 3), draw(2, 3)], dim


def _as_dtypes(draw: Draw) -> Iterator[Arguments]:
    for dtype in (torch.int64, torch.float64, torch.int32, torch.float32, torch.int16, torch.bfloat16, torch.uint8):
        yield draw(3, 16), dtype


def _converted(draw: Draw) -> Iterator[Arguments]:
    edges = torch.tensor([0.0, -0.5, 1.5, 300.7, -300.7, 3e9, -3e9, 1e19, float("nan"), float("inf"), -float("inf")])
    for dtype in (*EVERY, torch.int8, torch.uint8, torch.int16, torch.complex64):
        yield draw(3, 4), dtype
        if draw(1).is_floating_point():
            yield edges.to(draw(1).dtype), dtype


def _copied_to(draw: Draw) -> Iterator[Arguments]:
    yield from ((x, {"dtype": dtype}) for x, dtype in _converted(draw))


def _divided(draw: Draw) -> Iterator[Arguments]:
    for mode, divisor in itertools.product(("floor", "trunc", None), (3, -2, 0.1)):
        yield draw(3, 4), divisor, {"rounding_mode": mode}
        yield torch.tensor([1.0, 0.3, 0.9, -1.0, 6e4]).to(draw(1).dtype), divisor, {"rounding_mode": mode}


def _divided_by_tensors(draw: Draw) -> Iterator[Arguments]:
    whole = draw(1).dtype in (torch.int64, torch.int32)
    above = torch.tensor([7, -7, 8] if whole else [1.0, 0.3, 0.9, -1.0, 6e4]).to(draw(1).dtype)
    below = torch.tensor([2, -3, 4] if whole else [0.1, 0.2, -0.3, 0.7]).to(draw(1).dtype)
    for mode in ("floor", "trunc", None):
        yield above[:, None], below, {"rounding_mode": mode}


def _floor_divided(draw: Draw) -> Iterator[Arguments]:
    yield from ((above, below) for above, below, _ in itertools.islice(_divided_by_tensors(draw), 1))


def _sorted(draw: Draw) -> Iterator[Arguments]:
    for dim, descending in itertools.product((0, -1), (True, False)):
        yield draw(5, 4).round(), {"stable": True, "dim": dim, "descending": descending}


def _negated(draw: Draw) -> Iterator[Arguments]:
    yield (draw(3, 4),)
    yield (draw(3),)


def _as_complex(draw: Draw) -> Iterator[Arguments]:
    yield (draw(3, 2),)
    yield (draw(2, 3, 2),)


def _renormed(draw: Draw) -> Iterator[Arguments]:
    for order in (2.0, 1.0):
        yield draw(5, 4), torch.tensor([0, 2, 2]), 1.0, order


def _bag_backward(draw: Draw) -> Iterator[Arguments]:
    for mode, scaled in itertools.product((0, 1), (True, False)):
        indices, bags = torch.tensor([1, 3, 3, 0]), torch.tensor([0, 0, 1, 1])
        yield (
            draw(2, 3),
            indices,
            bags,
            torch.tensor([2, 2]),
            torch.empty(0, dtype=torch.int64),
            5,
            scaled,
            mode,
            None,
            -1,
        )


def _bag_forward(draw: Draw) -> Iterator[Arguments]:
    for mode in (0, 1, 2):
        yield draw(5, 3), torch.tensor([1, 3, 3, 0]), torch.tensor([0, 2]), False, mode, False, None, True, -1


def _solved(draw: Draw) -> Iterator[Arguments]:
    yield _definite(draw, 3, 3), draw(3, 2)
    yield _definite(draw, 2, 4, 4), draw(2, 4, 3)


def _householder(draw: Draw) -> Iterator[Arguments]:
    yield draw(4, 3), draw(3)
    yield draw(2, 4, 4), draw(2, 2)


def _recurrent(draw: Draw) -> Iterator[Arguments]:
    layers = {"lstm": (16, 8), "gru": (12, 4), "tanh": (4, 4), "relu": (4, 4)}
    for kind, (gates, state) in layers.items():
        yield draw(5, 2, gates), draw(2, state), [draw(gates, 4)], kind
    yield draw(5, 2, 12), draw(2, 4), [draw(12, 4), draw(12)], "gru"
    yield draw(5, 2, 16), draw(2, 7), [draw(16, 3), draw(3, 4)], "lstm"


def _recurrent_backward(draw: Draw) -> Iterator[Arguments]:
    for gates, state, weights, kind in _recurrent(draw):
        states = RECURRENCE(gates, state, weights, kind)
        yield draw(*states.shape), states, gates, state, weights, kind


def _grouped_matrices(draw: Draw) -> Iterator[Arguments]:
    yield draw(16, 16), draw(2, 16, 16), torch.tensor([8, 16], dtype=torch.int32)


def _grouped(draw: Draw) -> Iterator[Arguments]:
    yield draw(7, 3), draw(2, 3, 4), torch.tensor([3, 6])
    yield draw(7, 3), draw(3, 3, 4), torch.tensor([0, 5, 7])


def _group_products(draw: Draw) -> Iterator[Arguments]:
    yield draw(7, 3), draw(7, 4), torch.tensor([3, 6])


def _gathered(draw: Draw) -> Iterator[Arguments]:
    yield draw(4, 5), [3, 2], [5, 2], 1
    yield draw(4, 5), [2, 2, 2], [1, 1, 0]


def _random(draw: Draw) -> Iterator[Arguments]:
    for kind in ("uniform", "normal"):
        yield torch.tensor(7), [3, 5], kind, draw(1).dtype
        yield torch.tensor(-9), [4], kind, draw(1).dtype, torch.tensor([3])


def _chosen(draw: Draw) -> Iterator[Arguments]:
    """Greedy, then warm with filters, penalties and logprobs."""
    for warm in (False, True):
        whole = {"seed": 7, "drawn": 3, "top_k": 9, "logprobs": 2, "shaped": 1} if warm else {}
        real = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "repetition": 1.2, "presence": 0.1} if warm else {}
        asked = (
            [[dict(whole).get(name, 0) for name in INT_COLUMNS]] * 3,
            [[dict(real).get(name, 1.0) for name in FLOAT_COLUMNS]] * 3,
        )
        if not warm:
            asked[1][0][FLOAT_COLUMNS.index("temperature")] = 0.0
        seen = torch.arange(3 * 40).reshape(3, 40) % 5
        yield (
            draw(3, 40),
            torch.tensor(asked[0]),
            torch.tensor(asked[1]),
            torch.full((3, 2), -1, dtype=torch.int32),
            seen == 1,
            (seen == 2).int(),
            seen * 0.25,
            torch.tensor(1),
        )


def _sampled(draw: Draw) -> Iterator[Arguments]:
    for mode, border, aligned in itertools.product((0, 1), (0, 1, 2), (True, False)):
        yield draw(2, 3, 5, 6), draw(2, 4, 3, 2) / 2, torch.tensor([4, 6]), mode, border, aligned


def _sampled_backward(draw: Draw) -> Iterator[Arguments]:
    for x, grid, *settings in _sampled(draw):
        yield draw(2, 3, 4, 3), x, grid, *settings


def _columns(draw: Draw) -> Iterator[Arguments]:
    yield draw(2, 3, 6, 7), [2, 3], [1, 1], [0, 1], [1, 2]


def _of_columns(draw: Draw) -> Iterator[Arguments]:
    yield draw(2, 12, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1]


def _attention_backward(draw: Draw) -> Iterator[Arguments]:
    for heads, groups, is_causal in ((2, 2, False), (4, 2, False), (2, 1, True)):
        operands = draw(2, heads, 3, 4), draw(2, groups, 3, 4), draw(2, groups, 3, 4)
        out, logsumexp = internal.ATTENTION(*operands, None, is_causal, None)
        yield draw(2, heads, 3, 4), *operands, None, out, logsumexp, is_causal, None


def _segments(draw: Draw) -> Iterator[Arguments]:
    kept, ids = draw(2, 1, 1, 5) > -0.5, torch.tensor([0, 0, 1, 1, 2])
    documents = [ids[None, None, :3, None], ids[None, None, None]]
    for groups, conditions, pair, is_causal in (
        (2, [kept], [], False),
        (1, [], documents, True),
        (2, [kept], documents, False),
    ):
        yield draw(2, 2, 3, 4), draw(2, groups, 5, 4), draw(2, groups, 5, 4), conditions, pair, is_causal, None


def _segments_backward(draw: Draw) -> Iterator[Arguments]:
    for query, key, value, kept, ids, is_causal, scale in _segments(draw):
        out, logsumexp = internal.ATTENTION_OF_SEGMENTS(query, key, value, kept, ids, is_causal, scale)
        yield draw(2, 2, 3, 4), query, key, value, kept, ids, out, logsumexp, is_causal, scale


def _windowed(draw: Draw) -> Iterator[Arguments]:
    yield draw(4, 5), torch.tensor([1, 2]), [2, 3]
    yield draw(6), torch.tensor([5]), [1]
    yield draw(2, 3, 4), torch.tensor([0, 0, 0]), [2, 1, 4]


def _window_written(draw: Draw) -> Iterator[Arguments]:
    for x, starts, sizes in _windowed(draw):
        yield x, draw(*sizes), starts


_MAKERS: dict[OpOverload, tuple[tuple[torch.dtype, ...], Callable[[Draw], Iterator[Arguments]]]] = {
    aten._linalg_det.default: (WIDE, _square),
    aten._linalg_eigh.default: (WIDE, _square),
    aten.linalg_cholesky_ex.default: (WIDE, _square),
    aten.linalg_inv_ex.default: (WIDE, _square),
    aten._linalg_solve_ex.default: (WIDE, _solved),
    aten.linalg_householder_product.default: (WIDE, _householder),
    aten.bartlett_window.default: (FLOATS, _windows()),
    aten.blackman_window.default: (FLOATS, _windows()),
    aten.hamming_window.default: (FLOATS, _windows()),
    aten.hann_window.default: (FLOATS, _windows()),
    aten.kaiser_window.default: (FLOATS, _windows()),
    aten.bartlett_window.periodic: (FLOATS, _windows(False)),
    aten.blackman_window.periodic: (FLOATS, _windows(False)),
    aten.hamming_window.periodic: (FLOATS, _windows(False)),
    aten.hann_window.periodic: (FLOATS, _windows(False)),
    aten.kaiser_window.periodic: (FLOATS, _windows(False)),
    aten.hamming_window.periodic_alpha: (FLOATS, _windows(True, 0.5)),
    aten.hamming_window.periodic_alpha_beta: (FLOATS, _windows(True, 0.5, 0.4)),
    aten.kaiser_window.beta: (FLOATS, _windows(True, 8.0)),
    aten.fft_fftfreq.default: (FLOATS, _frequencies),
    aten.fft_rfftfreq.default: (FLOATS, _frequencies),
    aten._upsample_bicubic2d_aa.default: (WIDE, _antialiased),
    aten._upsample_lanczos2d_aa.default: (WIDE, _antialiased),
    aten._upsample_bicubic2d_aa_backward.default: (WIDE, _antialiased_backward),
    aten._upsample_lanczos2d_aa_backward.default: (WIDE, _antialiased_backward),
    aten._native_batch_norm_legit_no_training.default: (FLOATS, _batch_norm),
    aten._native_batch_norm_legit_functional.default: (FLOATS, _batch_norm_functional),
    aten._fused_rms_norm.default: (FLOATS, _rms_norm),
    aten._addmm_activation.default: (FLOATS, _addmm_activation),
    aten.index.Tensor: (EVERY, _indexed),
    aten._unsafe_index.Tensor: (EVERY, _indexed),
    aten.index_put.default: (EVERY, _index_put),
    aten._unsafe_index_put.default: (EVERY, _index_put),
    aten.im2col.default: (FLOATS, _columns),
    aten.col2im.default: (FLOATS, _of_columns),
    aten.norm.ScalarOpt_dtype: (WIDE, _norms),
    aten.norm.ScalarOpt_dim_dtype: (WIDE, _norms_of_dims),
    aten.reshape.default: (EVERY, _reshaped),
    aten._reshape_copy.default: (EVERY, _reshaped),
    aten._reshape_alias.default: (EVERY, _reshape_alias),
    aten.split_copy.Tensor: (EVERY, _split),
    aten.unsafe_split_with_sizes.default: (EVERY, _split_sizes),
    aten._aminmax.dim: (EVERY, _of_dim),
    aten.squeeze_copy.dims: (EVERY, _squeezed),
    aten.select_copy.int: (EVERY, _selected),
    aten._stack.default: (EVERY, _stacked),
    aten.view.dtype: (EVERY, _as_dtypes),
    aten.view_copy.dtype: (EVERY, _as_dtypes),
    torch.ops.prims.convert_element_type.default: (EVERY, _converted),
    aten._to_copy.default: (EVERY, _copied_to),
    aten.div.Scalar_mode: ((*FLOATS, torch.int64), _divided),
    aten.div.Tensor_mode: ((*FLOATS, torch.int64), _divided_by_tensors),
    aten.floor_divide.default: ((*FLOATS, torch.int64), _floor_divided),
    aten.argsort.stable: ((*FLOATS, torch.int64), _sorted),
    aten._neg_view.default: (EVERY[:-1], _negated),
    aten.view_as_complex_copy.default: (WIDE, _as_complex),
    aten.embedding_renorm.default: (WIDE, _renormed),
    aten._embedding_bag_dense_backward.default: (WIDE, _bag_backward),
    aten._embedding_bag.default: (FLOATS, _bag_forward),
    aten.addmm.default: ((*FLOATS, torch.int64), _scaled_sums((3, 4), (3, 5), (5, 4))),
    aten.baddbmm.default: ((*FLOATS, torch.int64), _scaled_sums((2, 3, 4), (2, 3, 5), (2, 5, 4))),
    aten.addbmm.default: ((*WIDE, torch.int64), _scaled_sums((3, 4), (2, 3, 5), (2, 5, 4))),
    aten.addmv.default: ((*FLOATS, torch.int64), _scaled_sums((3,), (3, 5), (5,))),
    aten.addr.default: (FLOATS, _scaled_sums((3, 4), (3,), (4,))),
    aten.lerp.Scalar: (FLOATS, _lerped),
    aten._grouped_mm.default: ((torch.bfloat16, torch.float32), _grouped_matrices),
    RECURRENCE: (FLOATS, _recurrent),
    RECURRENCE_BACKWARD: (FLOATS, _recurrent_backward),
    internal.GROUPED_PRODUCT: (FLOATS, _grouped),
    internal.GROUP_PRODUCTS: (FLOATS, _group_products),
    internal.GATHER_STRIDED: (EVERY, _gathered),
    WINDOW: (EVERY, _windowed),
    WINDOW_SCATTER: (EVERY, _window_written),
    RANDOM: (FLOATS, _random),
    CHOOSE: ((torch.float32, torch.bfloat16, torch.float16), _chosen),
    internal.SAMPLE_GRID: (WIDE, _sampled),
    internal.SAMPLE_GRID_BACKWARD: (WIDE, _sampled_backward),
    internal.ATTENTION_BACKWARD: (FLOATS, _attention_backward),
    internal.ATTENTION_OF_SEGMENTS: (FLOATS, _segments),
    internal.ATTENTION_OF_SEGMENTS_BACKWARD: (FLOATS, _segments_backward),
}
