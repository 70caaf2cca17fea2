"""Results that nothing is differentiated of leave gradients as in eager PyTorch: no NaN, and none where eager has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynaxla import backward_graphs
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

Function = Callable[..., Any]


class Doubled(torch.autograd.Function):
    """Its `backward` gives another gradient for zeros than for nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first, second = gradients
        return first * 2 + second.exp()


def find_gradients(function: Function, given: Sequence[Tensor], used: Sequence[int]) -> list[Tensor | None]:
    leaves = [x.detach().clone().requires_grad_() for x in given]
    results = function(*leaves)
    sum(results[i].sum() for i in used).backward()  # type: ignore[union-attr]
    return [leaf.grad for leaf in leaves]


def assert_as_eager(function: Function, compiled: Function, given: Sequence[Tensor], used: Sequence[int]) -> None:
    expected, made = (find_gradients(each, given, used) for each in (function, compiled))
    assert [each is None for each in made] == [each is None for each in expected]
    for mine, eagers in zip(made, expected, strict=True):
        if mine is not None:
            assert_close(mine, eagers)


def logarithm(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x * y, x.log(), y.sqrt().sum()


def parts(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The gradient of a part joins that of another."""
    low, high = x.chunk(2)
    return low.log(), high * 3, y.log()


def rows(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x[0].rsqrt(), x[1:] * y[1:], y[0] / x[0]


def written(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    kept = y * 1
    kept[1:] = x[1:].log()
    return x * 3, kept, y * 2


def looked_up(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    best, place = x.max(0)
    return best.log(), x.gather(0, place[None]), torch.where(y > 0, y, x).log()


def branches(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x * 2, torch.cond(x.sum() > 9, torch.log, torch.sqrt, (x,)), y * 2


def recomputed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x * 2, checkpoint(lambda value: value.log().sin(), x, use_reentrant=False), y * x


def viewed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Two results that share memory."""
    base = x.log()
    return base[0], base[1:], y * 2


def own(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (*Doubled.apply(x), y * 3)  # type: ignore[no-untyped-call]


def own_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A gradient comes to one call, or to both."""
    first, second = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return (second, *Doubled.apply(first.exp()))  # type: ignore[no-untyped-call]


def scanned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Its formula adds what the forward saved to the logarithm of the gradient."""
    return x * y, x.logcumsumexp(0), y.cumprod(0)


class Prepared(torch.autograd.Function):
    """As losses that compute their gradient in the forward: `backward` reads none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sign())
        return x.abs().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return ctx.saved_tensors[0]  # type: ignore[no-any-return]


class Added(torch.autograd.Function):
    """As an auxiliary loss of a router: it gives x, and its second gradient is ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones(1, device=gradients[0].device)


class Paired(torch.autograd.Function):
    """The gradient of each result goes to an input of its own, or to both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        first, second = gradients
        x, y = ctx.saved_tensors
        return first * y + second * x.exp(), first * x


class Mixed(torch.autograd.Function):
    """Results without gradients, among which are none, and a `backward` that reads none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> tuple[Any, ...]:
        place = x.argmax()
        ctx.mark_non_differentiable(place)
        ctx.rows, ctx.device = x.shape[0], x.device
        return place, x * factor, x.shape[0], None, x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        return torch.ones(ctx.rows, 3, device=ctx.device), None


def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    _, product, rows, _, exponential = Mixed.apply(x, 3)  # type: ignore[no-untyped-call]
    return product * rows, x.log(), exponential * y


def prepared(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return Prepared.apply(x), x.log(), Prepared.apply(y * 2)  # type: ignore[no-untyped-call]


def added(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return Added.apply(y * 3, x.exp().sum().view(1)), x.sqrt(), y * x  # type: ignore[no-untyped-call]


def paired(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first, second = Paired.apply(x, y)  # type: ignore[no-untyped-call]
    return first.log(), second, y.log()


def hooked(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x * 3
    if z.requires_grad:
        z.register_hook(torch.ones_like)
    return z * 2, x.log(), y * x


def without_slope(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Gradients of zeros, whatever comes."""
    return torch.copysign(y, x), x.sin(), x**0 + y


FUNCTIONS = (
    *(logarithm, parts, rows, written, looked_up, branches, recomputed, viewed),
    *(scanned, own, own_twice, mixed, prepared, added, paired, hooked),
)
USES = [used for count in (1, 2) for used in combinations(range(3), count)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_eagers(function: Function, dynamic: bool, recorder: Recorder) -> None:
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -0.0], [1.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    with recorder.expect(eager_ops=0):
        for used in USES:
            assert_as_eager(function, compiled, [x, x.flip(0)], used)


@pytest.mark.parametrize("used", [(0,), (0, 1), (0, 1, 2), (1, 2)])
def test_gradients_that_are_zeros_whatever_comes(used: tuple[int, ...]) -> None:
    """Where no result of theirs is used, they are zeros, and None in eager: their formulas say nothing of what comes."""
    compiled = torch.compile(without_slope, backend="dynaxla")
    assert_as_eager(without_slope, compiled, [torch.ones(3), torch.ones(3)], used)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 2.0], dtype=dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).abs(), x.log().abs()

    compiled = torch.compile(function, backend="dynaxla")
    assert_as_eager(function, compiled, [x], [0])


def test_padding_leaves_them_alone(recorder: Recorder) -> None:
    """Two sizes of a bucket have the same programs."""
    compiled = torch.compile(parts, backend="dynaxla", dynamic=True)
    for size in (10, 12):
        x = torch.arange(float(size))
        if size == 12:
            with recorder.expect(compiles=0, eager_ops=0):
                assert_as_eager(parts, compiled, [x, x], [1, 2])
        else:
            assert_as_eager(parts, compiled, [x, x], [1, 2])


def test_an_optimizer_leaves_parameters_alone_that_nothing_is_differentiated_of() -> None:
    def train(wrap: Callable[[Function], Function]) -> list[Tensor]:
        torch.manual_seed(0)
        heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 2)])
        optimizer = torch.optim.AdamW(heads.parameters(), lr=0.1, weight_decay=0.5)
        step = wrap(lambda x: [head(x) for head in heads])
        for _ in range(3):
            optimizer.zero_grad()
            step(torch.ones(5, 4))[0].square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in heads.parameters()]

    expected, made = train(lambda f: f), train(lambda f: torch.compile(f, backend="dynaxla"))
    for mine, eagers in zip(made, expected, strict=True):
        assert_close(mine, eagers)


def test_nothing_is_compiled_where_no_result_is_differentiated(recorder: Recorder) -> None:
    """Autograd calls a backward also with undefined gradients alone."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> None:
            return None

    x, y = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    result = torch.compile(torch.log, backend="dynaxla")(x)
    with recorder.expect(compiles=0):
        (Cut.apply(result) + y).sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert x.grad is None
    assert y.grad is not None
    result.sum().backward()
    assert_close(x.grad, torch.full((3,), torch.inf))


def test_each_set_is_compiled_once(recorder: Recorder) -> None:
    compiled = torch.compile(logarithm, backend="dynaxla", dynamic=False)
    given = [torch.ones(3), torch.ones(3)]
    with recorder.expect(compiles=2):  # the forward, and the backward of this set
        assert_as_eager(logarithm, compiled, given, [0])
    with recorder.expect(compiles=1):
        assert_as_eager(logarithm, compiled, given, [0, 2])
    with recorder.expect(compiles=0):
        assert_as_eager(logarithm, compiled, given, [0])
        assert_as_eager(logarithm, compiled, given, [0, 2])


def test_sets_beyond_the_bound_run_in_eager(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_graphs, "MAX_BUILT", 2)
    compiled = torch.compile(logarithm, backend="dynaxla", dynamic=False)
    given = [torch.zeros(3), torch.ones(3)]
    for used in ([0], [1]):
        assert_as_eager(logarithm, compiled, given, used)
    with recorder.expect(compiles=0):
        for used in ([2], [0, 2]):
            assert_as_eager(logarithm, compiled, given, used)
    assert any("other sets of them were met before" in each for each in recorder.snapshot().fallbacks)


def test_a_backward_that_runs_again() -> None:
    compiled = torch.compile(logarithm, backend="dynaxla")
    x, y = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    product, _, root = compiled(x, y)
    product.sum().backward(retain_graph=True)
    root.backward(retain_graph=True)
    (product.sum() + root).backward()
    assert_close(x.grad, torch.full((3,), 2.0))
    assert_close(y.grad, torch.full((3,), 1.0))


def make_number(x: Tensor) -> Tensor:
    return (x * 2).sin() * torch.tensor(len(x))


def choose(x: Tensor) -> Tensor:
    return torch.cond(x.shape[0] > 4, lambda x: (x * 2).sin() * x, lambda x: (x * 3).cos() * x, (x,))  # type: ignore


def reduce_segments(x: Tensor) -> Tensor:
    return torch.segment_reduce((x * 2).sin() * x, "sum", lengths=torch.tensor([1, len(x) - 1]))


@pytest.mark.parametrize("function", [make_number, choose, reduce_segments])
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_backward_that_is_compiled_ahead_runs_again(function: Callable[..., Tensor], dynamic: bool | None) -> None:
    """No capture is kept of these, so torch's cache has no say in what the backward may write to."""
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for size in (3, 6):
        x = torch.linspace(-1, 1, size * 4).view(size, 4)
        gradients = []
        for run in (function, compiled):
            given = x.clone().requires_grad_()
            total = run(given).sum()
            total.backward(retain_graph=True)
            total.backward()
            gradients.append(given.grad)
        assert_close(gradients[1], gradients[0])


def test_calls_are_verified(recorder: Recorder) -> None:
    compiled = torch.compile(parts, backend="dynaxla", options={"verify": 1.0})
    with recorder.expect(diverged_calls=0):
        assert_as_eager(parts, compiled, [torch.arange(4.0), torch.arange(4.0)], [1])


def test_compiled_autograd_gets_zeros() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(logarithm, backend="dynaxla")

        @torch.compile(backend="dynaxla")
        def step(x: Tensor) -> None:
            compiled(x, x)[0].sum().backward()

        step(x)
    assert_close(x.grad, torch.full((3,), 2.0))
