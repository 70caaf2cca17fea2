"""The rules of Fourier transforms, linear algebra and distances against eager torch, and graphs that hold them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from dynaxla.observe.recorder import Recorder
from dynaxla.ops.promotion import JNP_DTYPES
from dynaxla.ops.table import core_table
from tests.ops.rule_check import (
    Call,
    Catch,
    draw_samples,
    run_rule,
    run_rules,
    run_sample,
    targets_of,
    to_torch,
)

aten = torch.ops.aten

TARGETS = targets_of("spectral")
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
# Relative to the largest element: two libraries round differently, and a product or solve mixes a matrix's elements.
ROUNDING = {torch.float32: 2e-5, torch.complex64: 2e-5, torch.float64: 1e-9, torch.complex128: 1e-9}
# Eager makes it of lazily conjugated views, which nothing resolves under a dispatch mode; cases below go without one.
REAL_ONLY_WHEN_CAUGHT = {aten.linalg_pinv.atol_rtol_tensor}
VALUES = {aten._linalg_svd.default: 1, aten._linalg_eigh.default: 0}  # the vectors' signs are free

OPINFO_NAMES = """
fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.hfft2 fft.ihfft2
fft.fftn fft.ifftn fft.rfftn fft.irfftn fft.hfftn fft.ihfftn stft istft
linalg.inv linalg.inv_ex linalg.solve linalg.solve_ex linalg.solve_triangular triangular_solve linalg.lu_factor
linalg.lu_factor_ex linalg.lu linalg.lu_solve lu_solve lu_unpack linalg.cholesky linalg.cholesky_ex cholesky_solve
cholesky_inverse linalg.qr geqrf ormqr linalg.householder_product linalg.det linalg.slogdet logdet linalg.svdvals
linalg.eigvalsh linalg.pinv matrix_exp linalg.cross cross cdist nn.functional.pdist
linalg.tensorinv linalg.tensorsolve
""".split()


def refusal(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], reads: int | None = None) -> str | None:
    """What the row's check says of this call, made into a node of which result `reads` is used."""
    check = core_table().records[target].check
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
    node = graph.call_function(target, node_args, node_kwargs)
    if reads is not None:
        graph.output(graph.call_function(operator.getitem, (node, reads)))
    return check(node)


def assert_agrees(call: Call, results: Any) -> None:
    said = f"the call is {call.target}{call.args}, {call.kwargs}"
    assert isinstance(results, tuple) == isinstance(call.expected, (tuple, list)), said
    results, wanted = tree_leaves(results), tree_leaves(call.expected)
    assert len(results) == len(wanted), said
    for position, (result, eager) in enumerate(zip(results, wanted, strict=True)):
        assert tuple(result.shape) == tuple(eager.shape), said
        assert result.dtype == JNP_DTYPES[eager.dtype], said
        if VALUES.get(call.target, position) == position:
            assert_close(to_torch(result), eager.detach().resolve_conj().resolve_neg())


def assert_close(actual: torch.Tensor, eager: torch.Tensor) -> None:
    finite = eager.abs()[eager.isfinite()]
    scale = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
    rounding = ROUNDING.get(eager.dtype, 0.0)
    torch.testing.assert_close(actual, eager, rtol=rounding, atol=rounding * scale, equal_nan=True)


class CatchChecked(Catch):
    """Collects the calls that no check refuses."""

    def is_wanted(self, target: Any, args: Any, kwargs: Any) -> bool:
        if self.is_enough(target) or refusal(target, args, kwargs):
            return False
        return not (target in REAL_ONLY_WHEN_CAUGHT and self.dtype.is_complex)


@pytest.mark.parametrize("name", OPINFO_NAMES)
def test_rules_agree_with_eager_on_opinfo_samples(name: str, full: bool) -> None:
    infos = [info for info in op_db if info.name == name]
    assert infos, f"no OpInfo is named {name}"
    catch = CatchChecked(TARGETS, full)
    for info in infos:
        for dtype in DTYPES:
            if dtype not in info.dtypes:
                continue
            catch.dtype = dtype
            backward = dtype in (torch.float32, torch.complex128) and info.supports_autograd
            for sample in draw_samples(info, dtype, backward):
                with catch:
                    run_sample(info, sample, backward)
    assert catch.calls
    for call, results in zip(catch.calls, run_rules(catch.calls), strict=True):
        assert_agrees(call, results)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(7))


def positive(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = numbers(n, n, dtype=dtype)
    return x @ x.mH + torch.eye(n, dtype=dtype)


NAN, INF = math.nan, math.inf
C128 = torch.complex128
GRID = numbers(3, 4, 5, 2, 3)
POINTS, OTHERS = numbers(2, 6, 3), numbers(2, 5, 3)
ON_ITSELF = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 5.0]])
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, INF)
SINGULAR = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]])
# One matrix per way to fail: from the start, at the second minor, at the third, by NaN, and one that does not.
FAILING = torch.stack([positive(3, torch.float32)] * 5)
FAILING[0, 0, 0] = -1.0
FAILING[1, 1, 1] = -100.0
FAILING[2, 2, 2] = 0.0
FAILING[3, 2, 1] = FAILING[3, 1, 2] = NAN

CASES: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    *[(aten._fft_c2c.default, (GRID + 1j, d, m, f), {})
      for d in ([0], [4, 1], [0, 1, 2, 3, 4], []) for m in (0, 1, 2) for f in (True, False)],
    *[(aten._fft_r2c.default, (GRID, d, m, half), {})
      for d in ([0], [3, 1], [0, 1, 2, 4, 3]) for m in (0, 1, 2) for half in (True, False)],
    *[(aten._fft_c2r.default, (numbers(3, 4, 5, dtype=C128), d, m, n), {})
      for d, n in (([0], 4), ([0], 5), ([2, 1], 6), ([0, 1, 2], 8), ([2], 5)) for m in (0, 1, 2)],
    *[(op, (n, 0.5), {"dtype": torch.float64})
      for op in (aten.fft_fftfreq.default, aten.fft_rfftfreq.default) for n in (1, 6, 7)],
    (aten.fft_fftfreq.default, (5,), {"dtype": torch.bfloat16}),
    *[(aten.linalg_lu_factor_ex.default, (a,), {}) for a in (SINGULAR, numbers(4, 2), numbers(2, 4), numbers(0, 3))],
    (aten.linalg_lu_factor_ex.default, (numbers(2, 0, 3),), {}),
    *[(aten.linalg_lu_solve.default, (*torch.linalg.lu_factor(numbers(3, 3, dtype=C128)), numbers(3, 3, dtype=C128)),
       {"left": left, "adjoint": adjoint}) for left in (True, False) for adjoint in (True, False)],
    *[(aten.lu_unpack.default, (*torch.linalg.lu_factor(numbers(4, 2)), data, pivots), {})
      for data in (True, False) for pivots in (True, False)],
    *[(op, (a,), {}) for op in (aten._linalg_det.default, aten._linalg_slogdet.default)
      for a in (SINGULAR, numbers(0, 0), numbers(4, 4), numbers(4, 4, dtype=C128))],
    (aten._linalg_solve_ex.default, (numbers(2, 3, 3), numbers(2, 3)), {}),
    (aten._linalg_solve_ex.default, (numbers(2, 3, 3).mT, numbers(4, 1, 5, 3)), {"left": False}),
    (aten.linalg_inv_ex.default, (numbers(3, 3, dtype=C128).mH,), {}),
    (aten.linalg_cholesky_ex.default, (positive(4, C128),), {"upper": True}),
    (aten.linalg_cholesky_ex.default, (positive(4).triu(),), {"upper": True}),
    (aten.linalg_cholesky_ex.default, (numbers(2, 0, 0),), {}),
    *[(aten.cholesky_solve.default, (numbers(2, 3, 1, dtype=C128), positive(3, C128), up), {}) for up in (True, False)],
    *[(aten.cholesky_inverse.default, (positive(3, C128), up), {}) for up in (True, False)],
    *[(aten.triangular_solve.default, (numbers(3, 2, dtype=C128), numbers(3, 3, dtype=C128), up, turned, unit), {})
      for up in (True, False) for turned in (True, False) for unit in (True, False)],
    *[(aten.linalg_qr.default, (numbers(*shape, dtype=dtype), mode), {})
      for shape in ((5, 3), (3, 5), (2, 4, 4), (3, 0), (0, 3)) for dtype in (torch.float32, C128)
      for mode in ("reduced", "complete", "r")],
    (aten.linalg_qr.default, (torch.tensor([[0.0, 2.0], [0.0, -1.0]]),), {}),
    *[(aten.ormqr.default, (*torch.geqrf(numbers(4, 4, dtype=C128)), numbers(4, 4, dtype=C128), left, turned), {})
      for left in (True, False) for turned in (True, False)],
    *[(aten._linalg_eigh.default, (numbers(4, 4, dtype=C128), side, False), {}) for side in "LU"],
    (aten._linalg_svd.default, (numbers(2, 4, 3), False, False), {}),
    (aten._linalg_svd.default, (numbers(2, 4, 3), True, True), {}),
    (aten._linalg_svd.default, (numbers(2, 1 << 17), False, False), {}),  # whose square no memory holds
    *[(aten.linalg_pinv.atol_rtol_tensor, (numbers(2, 5, 3, dtype=C128),), k)
      for k in ({}, {"rtol": torch.tensor(0.5)}, {"atol": torch.tensor(0.9)}, {"atol": torch.zeros(2, 1)})],
    (aten.linalg_pinv.atol_rtol_tensor, (positive(3, C128) - 2 * torch.eye(3),), {"hermitian": True}),
    (aten.linalg_pinv.atol_rtol_tensor, (torch.ones(3, 3),), {}),
    *[(aten.linalg_matrix_exp.default, (a,), {}) for a in (
        torch.diag(torch.tensor([-1000.0, 3.0], dtype=torch.float64)), numbers(2, 6, 6) * 8,
        numbers(3, 3, dtype=C128), torch.zeros(2, 2),
        torch.tensor([[NAN, 0.0], [0.0, 1.0]]), numbers(1, 1, dtype=torch.float32), numbers(2, 0, 0))],
    (aten.linalg_cross.default, (numbers(2, 3, 4), numbers(1, 3, 1)), {"dim": 1}),
    (aten.linalg_cross.default, (torch.arange(3), torch.tensor([5, -6, 7])), {}),
    *[(aten._cdist_forward.default, (POINTS, OTHERS, p, 0), {}) for p in POWERS],
    *[(aten._cdist_forward.default, (numbers(30, 3), 9 - numbers(2, 4, 3), 2.0, mode), {}) for mode in (None, 1, 2)],
    *[(aten._cdist_backward.default, (numbers(2, 6, 5), POINTS, OTHERS, p, torch.cdist(POINTS, OTHERS, p)), {})
      for p in POWERS],
    *[(aten._cdist_backward.default,
       (torch.ones(3, 3), ON_ITSELF, ON_ITSELF, p, torch.cdist(ON_ITSELF, ON_ITSELF, p)), {}) for p in POWERS],
    *[(aten._pdist_forward.default, (POINTS[0], p), {}) for p in POWERS],
    (aten._pdist_forward.default, (numbers(1, 3),), {}),
    *[(aten._pdist_backward.default, (torch.ones(3), ON_ITSELF, p, torch.pdist(ON_ITSELF, p)), {}) for p in POWERS],
]  # fmt: skip


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """What the rules give, from one executable for all cases."""
    return run_rules([Call(target, args, kwargs, None) for target, args, kwargs in CASES])


@pytest.mark.parametrize("place", range(len(CASES)), ids=[f"{place}-{case[0]}" for place, case in enumerate(CASES)])
def test_rules_agree_with_eager_at_the_edges(place: int, results: list[Any]) -> None:
    target, args, kwargs = CASES[place]
    assert refusal(target, args, kwargs) is None
    assert_agrees(Call.of(target, *args, **kwargs), results[place])


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_says_where_it_stopped(upper: bool) -> None:
    target, kwargs = aten.linalg_cholesky_ex.default, {"upper": upper}
    factor, info = (to_torch(result) for result in run_rule(target, (FAILING,), kwargs))
    expected_factor, expected_info = target(FAILING, **kwargs)
    assert expected_info.tolist() == [1, 2, 3, 3, 0]
    assert info.tolist() == expected_info.tolist()
    assert factor[:4].isnan().any(-1).any(-1).all()
    assert_close(factor[4], expected_factor[4])


def test_inv_says_which_pivot_is_zero() -> None:
    _, info = run_rule(aten.linalg_inv_ex.default, (SINGULAR,), {})
    assert to_torch(info).tolist() == aten.linalg_inv_ex.default(SINGULAR)[1].tolist() == [1, 2, 0]


REFUSED: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any], int | None]] = [
    (aten._linalg_det.default, (numbers(3, 3).mT,), {}, None),
    (aten._linalg_slogdet.default, (numbers(3, 6)[:, ::2],), {}, None),
    (aten.linalg_lu.default, (numbers(3, 3),), {"pivot": False}, None),
    (aten.linalg_lu_factor_ex.default, (numbers(3, 3),), {"check_errors": True}, None),
    (aten.linalg_cholesky_ex.default, (positive(3),), {"check_errors": True}, None),
    (aten.linalg_inv_ex.default, (positive(3),), {"check_errors": True}, None),
    (aten._linalg_svd.default, (numbers(3, 3),), {}, 0),
    (aten._linalg_svd.default, (numbers(3, 3),), {}, 2),
    (aten._linalg_eigh.default, (positive(3),), {}, 1),
]


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "reads"), REFUSED, ids=[f"{place}-{case[0]}" for place, case in enumerate(REFUSED)]
)
def test_calls_the_rules_cannot_do_are_refused(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], reads: int | None
) -> None:
    assert refusal(target, args, kwargs, reads)


def test_values_without_vectors_are_taken() -> None:
    assert refusal(aten._linalg_svd.default, (numbers(3, 3),), {}, 1) is None
    assert refusal(aten._linalg_eigh.default, (positive(3),), {}, 0) is None


def mix_tokens(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x + torch.fft.fft2(x).real, (x.shape[-1],))


def filter_spectrum(x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(x, norm="ortho")
    return torch.fft.irfft(spectrum * torch.fft.rfftfreq(x.shape[-1]), n=x.shape[-1], norm="ortho").tanh()


def spectrogram(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x.flatten(1), 16, 4, window=torch.hann_window(16, dtype=x.dtype), return_complex=True).abs()


def least_squares(x: torch.Tensor) -> torch.Tensor:
    q, r = torch.linalg.qr(x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype))
    return torch.linalg.solve_triangular(r, q.mT @ x, upper=True)


def whole(function: Callable[..., torch.Tensor], x: torch.Tensor, recorder: Recorder, graphs: int) -> None:
    """Compiled without eager parts, forward and (with two graphs) backward, equal to eager."""
    given, twin = x.clone().requires_grad_(graphs == 2), x.clone().requires_grad_(graphs == 2)
    expected = function(twin)
    compiled = torch.compile(function, backend="dynaxla")
    with recorder.expect(compiles=graphs, eager_ops=0):
        actual = compiled(given)
        if graphs == 2:
            actual.square().sum().backward()
    assert_close(actual.detach(), expected.detach())
    if graphs == 2:
        expected.square().sum().backward()
        assert_close(given.grad, twin.grad)
    with recorder.expect(compiles=0):
        compiled(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("graphs", [1, 2], ids=["inference", "training"])
@pytest.mark.parametrize(
    "function",
    [mix_tokens, filter_spectrum, spectrogram, least_squares],
)
def test_graphs_are_compiled_whole(
    function: Callable[..., torch.Tensor], graphs: int, dtype: torch.dtype, recorder: Recorder
) -> None:
    whole(function, numbers(2, 8, 12, dtype=dtype), recorder, graphs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.det(x).exp(),
        lambda x: torch.linalg.slogdet(x)[1] * 2,
        lambda x: torch.linalg.inv_ex(x)[0] * 2,
        lambda x: torch.linalg.cholesky_ex(x @ x.mT)[0] * 2,
        lambda x: torch.linalg.lu(x)[1] * 2,
        lambda x: torch.linalg.pinv(x[:, :2]) * 2,
    ],
    ids=["det", "slogdet", "inv_ex", "cholesky_ex", "lu", "pinv"],
)
def test_factorizations_train_compiled_whole(function: Callable[..., torch.Tensor], recorder: Recorder) -> None:
    whole(function, numbers(4, 4), recorder, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.matrix_exp(x) * 2,
        lambda x: torch.cdist(x, x.exp(), p=1.0) * 2,
        lambda x: torch.pdist(x) * 2,
        lambda x: torch.linalg.cross(x[:, :3], x[:, 1:]) * 2,
    ],
    ids=["matrix_exp", "cdist", "pdist", "cross"],
)
def test_distances_and_functions_train_compiled_whole(
    function: Callable[..., torch.Tensor], recorder: Recorder
) -> None:
    whole(function, numbers(4, 4), recorder, 2)


@pytest.mark.parametrize("function", [torch.linalg.svdvals, torch.linalg.eigvalsh])
def test_values_compile_and_vectors_run_in_eager(function: Callable[..., torch.Tensor], recorder: Recorder) -> None:
    x = positive(4)
    whole(lambda x: function(x) * 2, x, recorder, 1)
    with recorder.expect(eager_ops=1):
        actual = torch.compile(lambda x: torch.linalg.eigh(x)[1] * 2, backend="dynaxla")(x)
    assert_close(actual, torch.linalg.eigh(x)[1] * 2)


CHECKED: list[Callable[..., torch.Tensor]] = [
    lambda a, b: torch.linalg.solve(a, b) * 2,
    lambda a, b: torch.linalg.inv(a) @ b,
    lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(a)),
]


@pytest.mark.parametrize("function", CHECKED, ids=["solve", "inv", "cholesky"])
def test_the_check_of_success_is_compiled_too(function: Callable[..., torch.Tensor], recorder: Recorder) -> None:
    a, b = positive(3), numbers(3, 2)
    compiled = torch.compile(function, backend="dynaxla")
    with recorder.expect(eager_ops=0, compiles=1):
        assert_close(compiled(a, b), function(a, b))
    with recorder.expect(compiles=0):
        assert_close(compiled(a + 1, b), function(a + 1, b))


@pytest.mark.parametrize("function", CHECKED, ids=["solve", "inv", "cholesky"])
def test_failure_raises_what_eager_raises(function: Callable[..., torch.Tensor]) -> None:
    a, b = torch.ones(3, 3, dtype=torch.float64), numbers(3, 2)
    with pytest.raises(torch.linalg.LinAlgError) as eager:
        function(a, b)
    with pytest.raises(torch.linalg.LinAlgError) as compiled:
        torch.compile(function, backend="dynaxla")(a, b)
    assert str(compiled.value) == str(eager.value)
