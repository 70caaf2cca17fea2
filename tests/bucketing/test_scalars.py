"""Numbers that no size depends on have no buckets: one program computes with any value of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx.experimental.dynamic_spec import IntVar, ParamsSpec

import dynaxla
from dynaxla.bucket_policy import DEFAULT, PowersOfTwo
from dynaxla.bucketing.joint_policy import JOINT, DimUsage
from dynaxla.bucketing.shape_keys import EXACT, ShapeKey, ShapeKeys
from dynaxla.bucketing.size_buckets import BucketScheme, SizeSource, SymbolPolicies
from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import compare, poison

S, T, N = sympy.symbols("s t n", integer=True)
VALUES = (9, 7, 1, 0, 2, -1, -6, 30, 31, 1000, -(2**20))  # the first call has the first for its own


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def _sizing(**settings: Any) -> BucketScheme:
    sources = tuple(SizeSource(place, None) for place in range(3))
    policies = SymbolPolicies(DEFAULT, JOINT, shapes=((S, 8), (2, T, 8)), **settings)
    return BucketScheme.initial((S, T), sources, (None, None), policies, (N,))


def test_a_plan_has_no_buckets_of_scalars() -> None:
    scheme = _sizing()
    assert scheme.bucket((9, 9, -3)) == scheme.bucket((9, 9, 1000)) == (16, 16)
    assert scheme.holds((16, 16), (9, 5, 0))
    assert scheme.make_bucket((16, 16)).scalars == (N,)
    assert scheme.make_bucket((16, 16)).read == (S, T, N)
    assert scheme.refine((9, 9, 4)).scalars == (N,)


def test_policies_of_scalars_say_nothing() -> None:
    scheme = _sizing(given={N: PowersOfTwo(min=64)}, together=(((S, N), JOINT.of(DimUsage((1, 1)))),))
    assert scheme.bucket((9, 9, 5)) == (16, 16)


def test_keys_know_scalars_of_exact_shapes_alone() -> None:
    ready: list[ShapeKey] = []
    keys = ShapeKeys((), _sizing(), lambda: ready)
    key = keys.of((9, 9, -3))
    ready.append(key)
    assert keys.larger((8, 8, 77)) == [(16 * 16, key)]
    keys.exclude(key)
    assert keys.of((9, 9, -3)) == (EXACT, 9, 9, -3)
    described = keys.describe([(EXACT, 9, 9, -3), (EXACT, 9, 9, 4)])
    assert described == "input 2 has the sizes -3, 4"
    assert keys.describe([key, (EXACT, 9, 5, 4)]) == "input 0 has the sizes 9, 16; input 1 has the sizes 5, 16"


def _position(x: torch.Tensor, n: int) -> tuple[Any, ...]:
    """What a loop does with the number of a token: arithmetic of every kind, and positions."""
    counted = x.long() + n // 3 - n % 5 + min(n, 4) * max(n, -4) - abs(n) + n * n
    return x * n, x.roll(n, 0), x.tril(n), counted, x / (n * n + 2), n + 1


def _check(compiled: Callable[..., Any], function: Callable[..., Any], *args: Any) -> None:
    compare(compiled(*args), function(*args), f"at {args[1:]}, {args[0].shape}")


def test_one_program_for_all_values(recorder: Recorder) -> None:
    compiled = torch.compile(_position, backend="dynaxla")
    x = torch.randn(5, 4)
    _check(compiled, _position, x, VALUES[0])
    with recorder.expect(compiles=1, graphs=1):
        for value in VALUES[1:]:
            _check(compiled, _position, x, value)


def _beside_a_size(x: torch.Tensor, n: int) -> tuple[Any, ...]:
    return x.softmax(0), x.flip(0) * n, (x * n).mean(0)


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_beside_a_scalar_keep_their_buckets(dynamic: bool | None, recorder: Recorder) -> None:
    compiled = torch.compile(_beside_a_size, backend="dynaxla", dynamic=dynamic, options={"buckets": DEFAULT})
    sizes: Sequence[int] = (7, 9, 12, 16, 30, 17, 12)
    _check(compiled, _beside_a_size, torch.randn(5, 4), 5)  # one symbol, as they are equal
    with recorder.expect(compiles=3 - (dynamic is True)):  # 8, 16 and 32
        for size, value in zip(sizes, VALUES, strict=False):
            _check(compiled, _beside_a_size, torch.randn(size, 4), value)


def _ignoring(x: torch.Tensor, n: int) -> tuple[Any, ...]:
    labels = torch.arange(len(x)) % 4
    return torch.nn.functional.cross_entropy(x, labels, ignore_index=n), x.softmax(0) * n


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_that_a_rule_takes_for_no_size_has_a_program_for_every_value(
    dynamic: bool | None, recorder: Recorder
) -> None:
    compiled = torch.compile(_ignoring, backend="dynaxla", dynamic=dynamic, options={"buckets": DEFAULT})
    _check(compiled, _ignoring, torch.randn(5, 4), 3)
    _check(compiled, _ignoring, torch.randn(6, 4), -7)
    before = dynaxla.read_metrics().exact_shapes
    with recorder.expect(compiles=4):
        for size, value in ((12, 2), (9, 2), (16, 2), (13, -100), (11, -100), (30, 2), (17, -100), (10, 2)):
            _check(compiled, _ignoring, torch.randn(size, 4), value)
    assert dynaxla.read_metrics().exact_shapes == before


WITH_NUMBERS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "leaky_relu": lambda x, p: F.leaky_relu(x, p),
    "leaky_relu_": lambda x, p: F.leaky_relu_(x * 2, p),
    "elu": lambda x, p: F.elu(x, p),
    "celu": lambda x, p: F.celu(x, p),
    "softplus": lambda x, p: F.softplus(x, p),
    "hardtanh": lambda x, p: F.hardtanh(x, -p, 2 * p),
    "threshold": lambda x, p: F.threshold(x, p, 0.5),
    "lerp": lambda x, p: torch.lerp(x, x.cos(), p),
    "addcmul": lambda x, p: torch.addcmul(x, x, x.cos(), value=p),
    "addcdiv": lambda x, p: torch.addcdiv(x, x, x.cos() + 2, value=p),
    "addmm": lambda x, p: torch.addmm(x, x, torch.ones(4, 4), beta=p, alpha=2),
    "baddbmm": lambda x, p: torch.baddbmm(x[None], x[None], torch.ones(1, 4, 4), beta=p),
    "addmv": lambda x, p: torch.addmv(x[:, 0], x, torch.ones(4), beta=p),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_number_of_a_size_is_no_constant(name: str, recorder: Recorder) -> None:
    """Two of them without gradients: with these torch captures them anew for every number, with every backend."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return WITH_NUMBERS[name](x, 1 / x.shape[0])

    trains = name not in ("celu", "lerp")
    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    before = dynaxla.read_metrics().exact_shapes
    with recorder.expect(compiles=1 + trains, eager_ops=0), torch.set_grad_enabled(trains):
        for size in (9, 11, 12, 16):
            _compare_gradients(compiled, function, torch.randn(size, 4))
    assert dynaxla.read_metrics().exact_shapes == before


@pytest.mark.parametrize("name", ["leaky_relu", "leaky_relu_", "elu", "softplus", "threshold", "addcdiv"])
def test_a_number_that_changes_needs_no_program(name: str, recorder: Recorder) -> None:
    """torch captures the other functions anew for every number, with every backend."""
    function = WITH_NUMBERS[name]
    compiled = torch.compile(function, backend="dynaxla")
    for size, number in ((9, 0.5), (10, 0.25)):
        _compare_gradients(compiled, function, torch.randn(size, 4), number)
    with recorder.expect(compiles=0, eager_ops=0):
        for size, number in ((11, 0.125), (12, 0.7), (16, 0.3), (9, 1.5)):
            _compare_gradients(compiled, function, torch.randn(size, 4), number)


UNREAD: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "addmm": lambda x, b: torch.addmm(x * torch.nan, x, torch.ones(3, 3), beta=b),
    "addmv": lambda x, b: torch.addmv(x[:, 0] * torch.inf, x, torch.ones(3), beta=b),
    "baddbmm": lambda x, b: torch.baddbmm(x[None] * torch.nan, x[None], torch.ones(1, 3, 3), beta=b),
    "addbmm": lambda x, b: torch.addbmm(x * torch.nan, x[None], torch.ones(1, 3, 3), beta=b),
    "addr": lambda x, b: torch.addr(x * torch.nan, x[:, 0], torch.ones(3), beta=b),
}


@torch.no_grad()
@pytest.mark.parametrize("name", UNREAD)
def test_what_a_factor_of_zero_meets_is_not_read(name: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return UNREAD[name](x, (x.shape[0] - 9) / 2)

    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    for size in (5, 9, 12, 7):
        x = torch.randn(size, 3)
        compare([compiled(x)], [function(x)], f"at {size}")


def _compare_gradients(
    compiled: Callable[..., Any], function: Callable[..., Any], x: torch.Tensor, *rest: float
) -> None:
    """Compares results, and gradients where they are enabled, with eager's."""
    both = []
    for run in (compiled, function):
        given = x.clone().requires_grad_()
        result = run(given, *rest)
        gradients = torch.autograd.grad(result.square().sum(), given) if result.requires_grad else ()
        both.append((result.detach(), *gradients))
    compare(*both, f"{rest} at {len(x)}")


def _in_a_shape(x: torch.Tensor, n: int) -> tuple[Any, ...]:
    return x[:n].sum(), x * n


def test_a_number_in_a_shape_keeps_its_buckets(recorder: Recorder) -> None:
    compiled = torch.compile(_in_a_shape, backend="dynaxla")
    x = torch.randn(40, 3)
    _check(compiled, _in_a_shape, x, 5)
    with recorder.expect(compiles=3):  # 8, 16 and 32
        for value in (7, 9, 12, 16, 31, 8):
            _check(compiled, _in_a_shape, x, value)


def test_a_declared_number_is_a_scalar_from_the_first_call_on(recorder: Recorder) -> None:
    spec = ParamsSpec({"n": IntVar("n", min=0, max=4000)})
    compiled = torch.compile(_position, backend="dynaxla", shapes_spec=spec)
    with recorder.expect(compiles=1, graphs=1):
        for value in (value for value in VALUES if value >= 0):  # below, torch's own guard fails
            _check(compiled, _position, torch.randn(5, 4), value)


@pytest.mark.parametrize("on_miss", ["error", "next_bucket"])
def test_frozen_programs_take_any_value(on_miss: Any, recorder: Recorder) -> None:
    compiled = torch.compile(_beside_a_size, backend="dynaxla")
    for size, value in ((5, 4), (20, 9)):
        _check(compiled, _beside_a_size, torch.randn(size, 4), value)
    dynaxla.freeze(compiled, on_miss)
    with recorder.expect(compiles=0, misses=0):
        for value in VALUES:
            _check(compiled, _beside_a_size, torch.randn(30, 4), value)
    if on_miss == "next_bucket":
        with recorder.expect(compiles=0, misses=1):
            _check(compiled, _beside_a_size, torch.randn(3, 4), -8)


def _window(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.softmax(0), x.flip(1), x.t() * 2


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_their_own_have_no_buckets(transposed: bool, recorder: Recorder) -> None:
    compiled = torch.compile(_window, backend="dynaxla")
    with recorder.expect(compiles=3):  # 5, and the buckets 8 and 16
        for rows, width in ((5, 7), (6, 19), (7, 32), (8, 40), (9, 41), (12, 100), (16, 28)):
            x = torch.randn(4, width)[:, :rows].t() if transposed else torch.randn(rows, width)[:, -4:]
            _check(compiled, _window, x)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("factor", [lambda s: 1 / s, lambda s: s**-0.5, lambda s: s / (s + 1)])
def test_a_number_that_a_backward_is_given_is_computed_in_it(
    factor: Callable[[int], float], dynamic: bool | None
) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * factor(x.shape[0])

    compiled = torch.compile(scaled, backend="dynaxla", dynamic=dynamic)
    before = dynaxla.read_metrics()
    for size in (5, 9, 12, 30):
        x = torch.randn(size, 4, requires_grad=True)
        (mine,), (eager,) = (torch.autograd.grad(run(x).sum(), x) for run in (compiled, scaled))
        compare(mine, eager, f"at {size}")
    after = dynaxla.read_metrics()
    assert after.exact_shapes == before.exact_shapes
    assert after.fallbacks == before.fallbacks


def test_a_whole_number_and_its_equal_fraction_are_two_scalars(recorder: Recorder) -> None:
    """A variance in float64 divides by a float, 1.0 among its numbers, and the gradient of an edge's copies indexes by 1."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (1, 1), mode="replicate").var(0)

    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    for rows in (5, 16, 12):
        x = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
        expected = torch.autograd.grad(function(x).sin().sum(), x)[0]
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sin().sum(), x)[0], expected)
