"""The rules on data movement and reduction against eager torch: value, shape and dtype of every call caught."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dynaxla.lowering.jax_rules.rule_set import JNP_DTYPES, Rule
from dynaxla.ops.tables.data import ROWS

aten = torch.ops.aten

MODULES = ("indexing", "scattering", "ordering", "reductions", "losses", "cumulative", "creation", "views")
RULES: dict[OpOverload, Rule] = {}
for _module in MODULES:
    RULES.update(importlib.import_module(f"dynaxla.lowering.jax_rules.{_module}").RULES)
CHECKS = {row.target: row.check for row in ROWS}

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
CALLS_PER_OVERLOAD = 2  # for one OpInfo and dtype: each call is compiled
SAMPLES = 8

# The memory behind these is not initialized, so only the shape and dtype are specified.
UNSPECIFIED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# The second result says where the first was found; torch leaves open which of equal elements that is.
PLACES = {"sort": 1, "topk": 2, "kthvalue": 2, "median": 1, "nanmedian": 1, "mode": 1}

OPINFO_NAMES = """
gather scatter scatter_add scatter_reduce index_put __getitem__ index_select index_add index_copy index_fill
index_reduce take put masked_fill masked_scatter select_scatter slice_scatter diagonal_scatter as_strided_scatter
nonzero_static bucketize searchsorted histc repeat_interleave unfold unfold_copy tril_indices triu_indices
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


def to_jax(tensor: torch.Tensor) -> jax.Array:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.dtype == torch.bfloat16:
        return jnp.asarray(plain.view(torch.uint16).numpy()).view(jnp.bfloat16)
    return jnp.asarray(plain.numpy())


def to_torch(array: jax.Array) -> torch.Tensor:
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(array.view(jnp.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def run_rule(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, kwargs))

    def traced(*arrays: jax.Array) -> Any:
        left = iter(arrays)
        full = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        call_args, call_kwargs = tree_unflatten(full, spec)
        return RULES[target](*call_args, **call_kwargs)

    with jax.enable_x64(True):
        return jax.jit(traced)(*[to_jax(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)])


def refusal(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What the row's check says of this call, made into a node."""
    check = CHECKS[target]
    if check is None:
        return None
    graph = torch.fx.Graph()

    def as_argument(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"input_{len(graph.nodes)}")
        node.meta["val"] = leaf
        return node

    node_args, node_kwargs = tree_map(as_argument, (args, kwargs))
    return check(graph.call_function(target, node_args, node_kwargs))


def in_float32(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Eager torch in float32 where the call is in a 16-bit float: some of its 16-bit kernels round at every step."""
    half = (torch.bfloat16, torch.float16)

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in half:
            return leaf.float()
        return torch.float32 if leaf in half else leaf

    wide_args, wide_kwargs = tree_map(widen, (args, kwargs))
    return tree_leaves(target(*wide_args, **wide_kwargs))


def assert_same(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> None:
    """Compare the rule with eager; a 16-bit float may instead be what float32 gives, rounded once."""
    results, wanted = run_rule(target, args, kwargs), expected
    assert isinstance(results, tuple) == isinstance(wanted, (tuple, list))
    results, wanted = tree_leaves(results), tree_leaves(wanted)
    assert len(results) == len(wanted)
    name = target.overloadpacket.__name__
    for position, (result, eager) in enumerate(zip(results, wanted, strict=True)):
        assert tuple(result.shape) == tuple(eager.shape)
        assert result.dtype == JNP_DTYPES[eager.dtype]
        if name in UNSPECIFIED:
            continue
        actual, eager = to_torch(result), eager.detach().resolve_conj().resolve_neg()
        if position == 1 and name in PLACES and not kwargs.get("stable"):
            assert_same_elements(name, args, kwargs, actual, eager)
        elif eager.dtype == torch.bfloat16 and name == "linspace":  # eager's last bits depend on its vector width
            rounding = torch.finfo(eager.dtype).eps * max(float(eager.abs().max()) if eager.numel() else 0.0, 1.0)
            torch.testing.assert_close(actual, eager, rtol=0, atol=rounding)
        elif eager.dtype in (torch.bfloat16, torch.float16):
            if not is_close(actual, eager):
                reference = in_float32(target, args, kwargs)[position].to(eager.dtype)
                torch.testing.assert_close(actual, reference, equal_nan=True)
        else:
            tolerance = {"rtol": 2e-5, "atol": 2e-5} if eager.dtype in (torch.float32, torch.complex64) else {}
            torch.testing.assert_close(actual, eager, equal_nan=True, **tolerance)


def is_close(actual: torch.Tensor, eager: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(actual, eager, equal_nan=True)
    except AssertionError:
        return False
    return True


def assert_same_elements(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], actual: torch.Tensor, eager: torch.Tensor
) -> None:
    x = args[0].detach()
    if x.ndim == 0:
        return
    place = PLACES[name]
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if actual.ndim < x.ndim:
        actual, eager = actual.unsqueeze(dim), eager.unsqueeze(dim)
    torch.testing.assert_close(x.gather(dim, actual), x.gather(dim, eager), equal_nan=True, rtol=0, atol=0)


class Catch(TorchDispatchMode):
    """Compares the calls that have a rule, a few of each kind, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[OpOverload, torch.dtype]] = Counter()
        self.dtype = torch.float32

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        key = (target, self.dtype)
        if target not in RULES or self.counts[key] >= CALLS_PER_OVERLOAD or refusal(target, args, kwargs):
            return target(*args, **kwargs)
        if any(tensor.layout != torch.strided or tensor.dtype not in JNP_DTYPES for tensor in tensors):
            return target(*args, **kwargs)
        expected = target(*args, **kwargs)
        self.counts[key] += 1
        assert_same(target, args, kwargs, expected)
        return expected


def run_sample(info: Any, sample: Any, backward: bool) -> None:
    outputs = tree_leaves(info.op(sample.input, *sample.args, **sample.kwargs))
    outputs = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not backward or not outputs:
        return
    inputs = [leaf for leaf in tree_leaves((sample.input, sample.args)) if isinstance(leaf, torch.Tensor)]
    inputs = [leaf for leaf in inputs if leaf.requires_grad]
    torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)


@pytest.mark.parametrize("name", OPINFO_NAMES)
def test_rules_agree_with_eager_on_opinfo_samples(name: str) -> None:
    infos = [info for info in op_db if info.name == name]
    assert infos, f"no OpInfo is named {name}"
    catch = Catch()
    for info in infos:
        for dtype in DTYPES:
            if dtype not in info.dtypes:
                continue
            catch.dtype = dtype
            backward = dtype == torch.float32 and info.supports_autograd
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=backward))
            for sample in samples[:: math.ceil(len(samples) / SAMPLES) or 1]:
                with catch:
                    run_sample(info, sample, backward)
    assert catch.counts


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
    *[(aten.linspace.default, (*e, n), {"dtype": I64}) for e in ((-11, 4), (0.0, 4.3), (5, -9)) for n in (1, 5, 50)],
    (aten.linspace.Tensor_Scalar, (torch.tensor(1.0), 3, 4), {}),
    (aten.logspace.Scalar_Tensor, (0, torch.tensor(2.0), 3), {"dtype": I64}),
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


@pytest.mark.parametrize(
    ("target", "args", "kwargs"), CASES, ids=[f"{place}-{case[0]}" for place, case in enumerate(CASES)]
)
def test_rules_agree_with_eager_at_the_edges(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert refusal(target, args, kwargs) is None
    assert_same(target, args, kwargs, target(*args, **kwargs))


REFUSED: list[tuple[OpOverload, tuple[Any, ...]]] = [
    (aten.index.Tensor, (NAMES, [NAMES > 3])),
    (aten.index.Tensor, (NAMES, [None, torch.ones(3, dtype=torch.uint8)])),
    (aten.index_put.default, (NAMES, [NAMES > 21], torch.tensor([1, 2]))),
    (aten.index_put.default, (NAMES, [None, torch.tensor([True, False, True])], torch.ones(2, 2, 4, dtype=I64))),
    (aten.index_put.default, (NAMES, [torch.tensor([True, False]), PAIR], torch.tensor(1))),
    (aten.repeat_interleave.Tensor, (torch.tensor([1, 2]),)),
    (aten.as_strided.default, (NAMES.mT, [2], [1])),
    (aten.as_strided.default, (NAMES[1], [2], [1])),
    (aten.as_strided.default, (NAMES[:1], [2], [12])),
    (aten.logcumsumexp.default, (torch.ones(2, dtype=torch.complex64), 0)),
]


@pytest.mark.parametrize(("target", "args"), REFUSED, ids=[f"{place}-{case[0]}" for place, case in enumerate(REFUSED)])
def test_calls_the_rules_cannot_do_are_refused(target: OpOverload, args: tuple[Any, ...]) -> None:
    assert refusal(target, args, {})


def test_every_rule_has_one_row_and_every_row_a_rule() -> None:
    targets = [row.target for row in ROWS]
    assert len(targets) == len(set(targets))
    assert set(targets) == set(RULES)
