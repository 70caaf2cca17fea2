"""The rules on data movement and reduction against eager torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from dynaxla.custom_ops.search_rows import SEARCH_ROWS
from tests.ops.rule_check import Call, assert_agrees, check_opinfo, refusal, run_rules, targets_of

aten = torch.ops.aten
TARGETS = targets_of("data")

OPINFO_NAMES = """
gather scatter scatter_add scatter_reduce index_put __getitem__ index_select index_add index_copy index_fill
index_reduce take put masked_fill masked_scatter select_scatter slice_scatter diagonal_scatter as_strided_scatter
nonzero_static bucketize searchsorted repeat_interleave unfold unfold_copy tril_indices triu_indices
_unsafe_masked_index _unsafe_masked_index_put_accumulate
sort argsort topk kthvalue median nanmedian mode argmax argmin max min aminmax msort
amax amin sum mean prod any all var std var_mean std_mean logsumexp norm linalg.vector_norm count_nonzero nansum
softmax log_softmax torch.ops.aten._safe_softmax.default dist trace
nn.functional.nll_loss nn.functional.cross_entropy nn.functional.binary_cross_entropy
nn.functional.binary_cross_entropy_with_logits nn.functional.mse_loss nn.functional.smooth_l1_loss
nn.functional.huber_loss nn.functional.soft_margin_loss
cumsum cumprod cummax cummin logcumsumexp
arange full full_like zeros ones zeros_like ones_like empty empty_like empty_strided new_empty new_empty_strided
new_full new_zeros new_ones eye linspace logspace scalar_tensor tril triu
view expand permute transpose t squeeze unsqueeze cat stack split split_with_sizes unbind repeat flip roll
rot90 as_strided diagonal diag_embed view_as_real view_as_complex block_diag view_as conj
permute_copy view_copy expand_copy as_strided_copy diagonal_copy squeeze_copy t_copy transpose_copy unsqueeze_copy
unbind_copy split_with_sizes_copy alias_copy narrow_copy unsafe_split
""".split()


@pytest.mark.parametrize("name", OPINFO_NAMES)
def test_rules_agree_with_eager_on_opinfo_samples(name: str, full: bool) -> None:
    check_opinfo(name, TARGETS, full)


def floats(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


NAN, INF = math.nan, math.inf
WITH_NAN = torch.tensor([[3.0, NAN, 1.0, 1.0], [2.0, 2.0, -INF, 2.0], [NAN, NAN, NAN, NAN], [0.0, -0.0, INF, 5.0]])
NAMES = torch.arange(24).reshape(2, 3, 4)
I64 = torch.int64
PAIR = torch.tensor([0, -1])

CASES: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    *[(op, (WITH_NAN, d), {}) for op in (aten.sort.default, aten.max.dim, aten.min.dim) for d in (0, 1)],
    *[(op, (WITH_NAN, d), {}) for op in (aten.cummax.default, aten.cummin.default) for d in (0, 1)],
    *[(op, (WITH_NAN, d), {}) for op in (aten.median.dim, aten.nanmedian.dim, aten._aminmax.dim) for d in (0, 1)],
    *[(op, (WITH_NAN, d), {}) for op in (aten.argmax.default, aten.argmin.default) for d in (None, 0, 1)],
    *[(op, (WITH_NAN,), {}) for op in (aten.max.default, aten.min.default, aten.median.default, aten.nansum.default)],
    *[(op, (WITH_NAN,), {}) for op in (aten.nanmedian.default, aten._aminmax.default, aten.any.default)],
    *[(aten.mode.default, (NAMES % 3, d), {}) for d in (0, 1, 2)],
    (aten.sort.default, (WITH_NAN, 1, True), {}),
    (aten.sort.stable, (torch.tensor([1, 0, 1, 0, 1, 0]),), {"stable": True, "descending": True}),
    (aten.sort.stable, (floats(0.0, -0.0, 0.0, -1.0),), {"stable": True}),
    (aten.topk.default, (WITH_NAN, 2, 1), {}),
    (aten.topk.default, (WITH_NAN, 3, 1, False), {}),
    (aten.kthvalue.default, (WITH_NAN, 4), {}),
    (aten.median.default, (torch.empty(0),), {}),
    (aten.median.default, (torch.empty(0, dtype=torch.int32),), {}),
    (aten.argsort.default, (WITH_NAN,), {}),
    (aten.argsort.stable, (WITH_NAN,), {"stable": True, "descending": True}),
    (aten.msort.default, (WITH_NAN,), {}),
    (aten.nonzero_static.default, (torch.empty(2, 0, 3),), {"size": 4}),
    (aten.index.Tensor, (NAMES, [PAIR, None, PAIR]), {}),
    (aten.index.Tensor, (NAMES, [None, PAIR, torch.tensor([[1], [-2]])]), {}),
    (aten.index.Tensor, (NAMES, [torch.tensor(1), None, torch.tensor([], dtype=I64)]), {}),
    (aten._unsafe_index.Tensor, (NAMES, [None, PAIR.int()]), {}),
    (aten.index_put.default, (NAMES, [PAIR, None, PAIR], torch.tensor(-5)), {}),
    (aten.index_put.default, (NAMES, [None, torch.tensor([1, 1, -2])], torch.ones(2, 3, 4, dtype=I64), True), {}),
    (aten.index_put.default, (WITH_NAN, [WITH_NAN.isnan()], torch.tensor(7.0)), {}),
    (aten.index_put.default, (WITH_NAN, [WITH_NAN[0].isnan()], torch.arange(4.0)), {}),
    (aten.index_put.default, (WITH_NAN, [WITH_NAN[1] == 2], torch.ones(1, 4), True), {}),
    (aten.index_put.default, (NAMES, [None, torch.tensor([True, False, True])], torch.full((2, 1, 4), 9)), {}),
    (aten.index_put.default, (NAMES, [None, NAMES[0] > 5], torch.tensor([[7], [8]])), {}),
    (aten.index_put.default, (torch.tensor([False, True]), [PAIR], torch.tensor([True, False]), True), {}),
    (aten._unsafe_index_put.default, (NAMES, [PAIR], torch.ones(1, 3, 4, dtype=I64), True), {}),
    (aten.take.default, (NAMES, torch.tensor([[0, -1], [5, -24]])), {}),
    (aten.put.default, (NAMES, torch.tensor([0, -1]), torch.tensor([50, 60])), {}),
    (aten.masked_scatter.default, (torch.zeros(3), torch.tensor([[True, False, True]] * 2), torch.arange(9.0)), {}),
    (aten.nonzero_static.default, (torch.tensor([[0, 1], [2, 0]]),), {"size": 3}),
    (aten.nonzero_static.default, (torch.tensor([1, 1, 1]),), {"size": 2, "fill_value": 5}),
    (aten.searchsorted.Tensor, (floats(1, 2, 2, 3), floats(2, NAN, INF, -INF, 0)), {}),
    (aten.searchsorted.Tensor, (floats(1, 2, 2, NAN), floats(2, NAN, INF)), {"side": "right", "out_int32": True}),
    *(
        (SEARCH_ROWS, (floats(1, 2, 2, NAN, 0), floats(2, NAN, INF), torch.tensor(count), right, right), {})
        for count in (0, 3, 4, 5)
        for right in (False, True)
    ),
    (aten.searchsorted.Tensor, (floats(3, 1, 2), floats(2, 1.5)), {"sorter": torch.tensor([1, 2, 0])}),
    (aten.searchsorted.Tensor, (torch.tensor([], dtype=I64), torch.tensor([4])), {}),
    (aten.searchsorted.Scalar, (torch.tensor([1, 2, 4]), 2), {"right": True}),
    (aten.bucketize.Scalar, (2.5, floats(1, 2, 3)), {}),
    (aten.histc.default, (floats(0, 1, 1, 2, 3, 9, -4), 4, 0, 3), {}),
    (aten.histc.default, (floats(2, 2, 2), 3), {}),
    (aten.repeat_interleave.Tensor, (torch.tensor([2, 0, 3]),), {"output_size": 5}),
    (aten.unfold_backward.default, (torch.ones(3, 2, 4), [5, 2], 0, 4, 1), {}),
    (aten.diagonal_backward.default, (torch.ones(2), [2, 3], 1, 0, 1), {}),
    (aten.select_backward.default, (torch.ones(2), [2, 3], 1, -1), {}),
    (aten.slice_backward.default, (torch.ones(2, 1), [2, 3], 1, 1, 9223372036854775807, 2), {}),
    (aten.slice_backward.default, (torch.ones(2, 3), [2, 3], 1, 0, 9223372036854775807, 1), {}),
    (aten.slice_scatter.default, (torch.zeros(2, 3), torch.ones(2, 3, dtype=I64), 0, -5), {}),
    *[(op, (torch.empty(0, 3), d), {}) for op in (aten.sum.dim_IntList, aten.mean.dim) for d in ([0], [1], [])],
    (aten.prod.default, (torch.empty(0),), {}),
    (aten.prod.dim_int, (torch.tensor([[2, 3], [4, 0]]), 1), {"dtype": torch.bool}),
    (aten.sum.default, (floats(1.5, -1.5),), {"dtype": I64}),
    (aten.sum.default, (torch.tensor([0, 2]),), {"dtype": torch.bool}),
    (aten.any.dims, (torch.tensor([[1, 0]]), []), {}),
    (aten.all.dims, (torch.tensor([[1, 0]], dtype=torch.uint8), [0, 1]), {}),
    (aten.var.correction, (floats(1.0),), {}),
    (aten.var.correction, (floats(1.0, 2.0),), {"correction": 5}),
    (aten.std_mean.correction, (torch.tensor([1 + 2j, 3 - 1j]),), {"correction": 0.5}),
    (aten.logsumexp.default, (WITH_NAN[1:2], [1]), {}),
    (aten.logsumexp.default, (torch.full((2, 2), -INF), [0]), {}),
    (aten.logsumexp.default, (torch.ones(2, 2, dtype=I64), [0], True), {}),
    *[(aten.linalg_vector_norm.default, (WITH_NAN[1], p), {}) for p in (0, 1, 2, 3.5, -1, INF, -INF)],
    (aten.linalg_vector_norm.default, (floats(3, 4, dtype=torch.bfloat16),), {"dtype": torch.float32}),
    (aten.norm.Scalar, (floats(3, 4),), {}),
    (aten.norm.ScalarOpt_dim, (NAMES.float(), None, [0, 2]), {}),
    (aten.norm.ScalarOpt_dtype, (floats(3, 4), 1), {"dtype": torch.float64}),
    (aten.norm.ScalarOpt_dim_dtype, (NAMES.float(), 3, [1], True), {"dtype": torch.float64}),
    (aten._softmax.default, (torch.full((2, 2), -INF), 0, False), {}),
    (aten._safe_softmax.default, (torch.tensor([[-INF, -INF], [0.0, -INF]]), 1), {}),
    (aten.nll_loss_forward.default, (torch.rand(3, 4), torch.tensor([0, 3, -100]), None, 0, -100), {}),
    (aten.nll_loss_forward.default, (torch.rand(2, 4), torch.tensor([1, 1]), None, 1, 1), {}),
    (aten.nll_loss_forward.default, (torch.rand(4), torch.tensor(2), torch.rand(4), 1, -100), {}),
    (aten.cumsum.default, (torch.tensor([True, False, True]), 0), {}),
    (aten.arange.start_step, (0.5, 5.0, 0.7), {"dtype": torch.float32}),
    (aten.arange.start_step, (5, 0, -2), {}),
    (aten.arange.start_step, (0.0, 7.9, 2.0), {"dtype": torch.int32}),
    (aten.arange.start, (2, 5), {"dtype": torch.bfloat16}),
    (aten.arange.default, (3,), {}),
    (aten.eye.m, (2, 3), {"dtype": torch.bool}),
    *[(aten.linspace.default, (*e, n), {}) for e in ((-11, 4), (0.0, 4.3), (5, -9)) for n in (1, 5, 50)],
    (aten.linspace.Tensor_Scalar, (torch.tensor(1.0), 3, 4), {}),
    (aten.logspace.Scalar_Tensor, (0, torch.tensor(2.0), 3), {}),
    *[(op, (n,), {}) for op in (aten.hann_window.default, aten.blackman_window.default) for n in (0, 1, 7)],
    (aten.hann_window.periodic, (6, False), {"dtype": torch.float64}),
    (aten.blackman_window.periodic, (6, False), {}),
    *[(op, (5,), {}) for op in (aten.bartlett_window.default, aten.kaiser_window.default, aten.hamming_window.default)],
    *[(op, (5, False), {}) for op in (aten.bartlett_window.periodic, aten.kaiser_window.periodic)],
    (aten.hamming_window.periodic, (5, False), {}),
    (aten.hamming_window.periodic_alpha, (5, True, 0.5), {}),
    (aten.hamming_window.periodic_alpha_beta, (5, True, 0.5, 0.4), {}),
    (aten.kaiser_window.beta, (5, True, 8.0), {}),
    (aten.cat.default, ([torch.empty(0), NAMES, NAMES.half()], 1), {}),
    (aten._stack.default, ([NAMES, NAMES], -1), {}),
    (aten.roll.default, (NAMES, [5]), {}),
    (aten.roll.default, (NAMES, [1, -2], [0, -1]), {}),
    (aten.view.default, (NAMES, [4, -1]), {}),
    (aten.reshape.default, (NAMES, [-1]), {}),
    (aten._reshape_copy.default, (NAMES, [6, 4]), {}),
    (aten._reshape_alias.default, (NAMES, [6, 4], [4, 1]), {}),
    (aten.view_copy.dtype, (NAMES, torch.int32), {}),
    (aten.view.dtype, (torch.tensor([1.5, -2.0]), torch.float64), {}),
    (aten.view.dtype, (torch.tensor([1 + 2j, 3j]), torch.float32), {}),
    (aten.view.dtype, (floats(1, 2, 3, 4), torch.complex64), {}),
    (aten.view.dtype, (torch.tensor([True, False]), torch.uint8), {}),
    (aten._conj_copy.default, (torch.tensor([1 + 2j]),), {}),
    (aten._neg_view_copy.default, (floats(1, 2),), {}),
    (aten.view_as_real_copy.default, (torch.tensor([1 + 2j]),), {}),
    (aten.view_as_complex_copy.default, (torch.tensor([[1.0, 2.0]]),), {}),
    (aten._unsafe_view.default, (NAMES, [8, 3]), {}),
    (aten.split_copy.Tensor, (NAMES, 3, -1), {}),
    (aten.slice_copy.Tensor, (NAMES, 2, -3, 9223372036854775807, 2), {}),
    (aten.slice.Tensor, (NAMES, 1, 2, 1), {}),
    (aten.select_copy.int, (NAMES, -1, -2), {}),
    (aten.detach_copy.default, (NAMES,), {}),
    (aten.lift.default, (NAMES,), {}),
    (aten.squeeze_copy.dims, (NAMES[:1, :, :1], [0, 2]), {}),
    (aten.unsafe_split_with_sizes.default, (NAMES, [1, 3], 2), {}),
    (aten.lift_fresh_copy.default, (NAMES,), {}),
]


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """What the rules give, from one executable for all cases."""
    return run_rules([Call(target, args, kwargs, None) for target, args, kwargs in CASES])


@pytest.mark.parametrize("place", range(len(CASES)), ids=[f"{place}-{case[0]}" for place, case in enumerate(CASES)])
def test_rules_agree_with_eager_at_the_edges(place: int, results: list[Any]) -> None:
    target, args, kwargs = CASES[place]
    assert refusal(target, args, kwargs) is None
    assert_agrees(Call.of(target, *args, **kwargs), results[place])


REFUSED: list[tuple[OpOverload, tuple[Any, ...]]] = [
    (aten.index.Tensor, (NAMES, [NAMES > 3])),
    (aten.index.Tensor, (NAMES, [None, torch.ones(3, dtype=torch.uint8)])),
    (aten.index_put.default, (NAMES, [NAMES > 21], torch.tensor([1, 2]))),
    (aten.index_put.default, (NAMES, [None, torch.tensor([True, False, True])], torch.ones(2, 2, 4, dtype=I64))),
    (aten.index_put.default, (NAMES, [torch.tensor([True, False]), PAIR], torch.tensor(1))),
    (aten.repeat_interleave.Tensor, (torch.tensor([1, 2]),)),
    (aten.as_strided.default, (NAMES.mT, [2], [1])),
    (aten.as_strided.default, (NAMES[1], [2], [1], 1)),
    (aten.as_strided.default, (NAMES[:1], [2], [12])),
    (aten.logcumsumexp.default, (torch.ones(2, dtype=torch.complex64), 0)),
]


def test_evenly_spaced_integers_are_refused() -> None:
    assert refusal(aten.linspace.default, (0, 5, 3), {"dtype": I64})


@pytest.mark.parametrize(("target", "args"), REFUSED, ids=[f"{place}-{case[0]}" for place, case in enumerate(REFUSED)])
def test_calls_the_rules_cannot_do_are_refused(target: OpOverload, args: tuple[Any, ...]) -> None:
    assert refusal(target, args, {})


@torch.no_grad()
def test_a_running_sum_of_constants_compiles() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(1, dtype=torch.bool).index_select(0, torch.arange(2) % 1).cumsum(0)

    compiled = torch.compile(f, backend="dynaxla", options={"fallback": "error"})
    assert torch.equal(compiled(torch.ones(2)), torch.tensor([2.0, 3.0]))


def test_a_truth_value_of_any_number() -> None:
    """A number that is even is true, too; its lowest bit is zero."""

    def fill(x: torch.Tensor) -> list[torch.Tensor]:
        numbers = (2, -256, 2**40, 1, 0, 0.5, 0.0, math.nan)
        made = [torch.full((2,), number, dtype=torch.bool) for number in numbers]
        made += [x.new_full((2,), number, dtype=torch.bool) for number in numbers]
        return made + [torch.full_like(x, number, dtype=torch.bool) for number in numbers]

    x = torch.ones(2)
    for mine, eager in zip(torch.compile(fill, backend="dynaxla")(x), fill(x), strict=True):
        assert mine.tolist() == eager.tolist()


def test_floats_out_of_the_range_of_small_integers() -> None:
    """The low bits of the whole number, not the nearest integer that there is."""

    def convert(x: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for dtype in (torch.int8, torch.uint8, torch.int16):
            made += [x.to(dtype), torch.zeros(2, 3, dtype=dtype).copy_(x), torch.zeros(2, dtype=dtype).fill_(x[0, 1])]
            made += [x.sum(dtype=dtype), x.sum(0, dtype=dtype), x[:, :2].prod(0, dtype=dtype), x.cumsum(0, dtype=dtype)]
        return made

    x = torch.tensor([[1.5, -3.7, 130.0], [300.0, -200.0, 70000.0]])
    for mine, eager in zip(torch.compile(convert, backend="dynaxla")(x), convert(x), strict=True):
        assert mine.tolist() == eager.tolist()
