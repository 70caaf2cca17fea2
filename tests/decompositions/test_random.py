"""Random numbers that executables draw: from torch's generator, of the right distribution, and the same in every bucket."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.custom_ops import threefry as ops
from dynaxla.decompositions.random_draws import NO_CHOICE
from dynaxla.observe.recorder import Recorder
from dynaxla.ops import random as rules
from tests.tolerances import assert_close

COUNT = 20_000
UNLIKELY = 1e-4  # a right distribution gives a smaller p-value at one seed in ten thousand; the seeds are fixed

# (key, counter) -> words, of the authors' own library (Random123, kat_vectors: threefry2x32, 20 rounds)
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]

WEIGHTS = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0])

DRAWS: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "rand": (lambda: torch.rand(COUNT), stats.uniform()),
    "rand_float64": (lambda: torch.rand(COUNT, dtype=torch.float64), stats.uniform()),
    "rand_like": (lambda: torch.rand_like(torch.empty(COUNT)), stats.uniform()),
    "randn": (lambda: torch.randn(COUNT), stats.norm()),
    "randn_float64": (lambda: torch.randn(COUNT, dtype=torch.float64), stats.norm()),
    "randn_like": (lambda: torch.randn_like(torch.empty(COUNT)), stats.norm()),
    "randn_complex": (lambda: torch.view_as_real(torch.randn(COUNT, dtype=torch.complex64)), stats.norm(0, 0.5**0.5)),
    "uniform_": (lambda: torch.empty(COUNT).uniform_(-3, 5), stats.uniform(-3, 8)),
    "normal_": (lambda: torch.empty(COUNT).normal_(2, 3), stats.norm(2, 3)),
    "normal_of_numbers": (lambda: torch.normal(2.0, 3.0, (COUNT,)), stats.norm(2, 3)),
    "rrelu": (lambda: F.rrelu(-torch.ones(COUNT), 0.2, 0.6, training=True), stats.uniform(-0.6, 0.4)),
    "normal_of_tensors": (lambda: torch.normal(torch.full((COUNT,), 2.0), torch.full((COUNT,), 3.0)), stats.norm(2, 3)),
    "exponential_": (lambda: torch.empty(COUNT).exponential_(2.0), stats.expon(scale=0.5)),
    "cauchy_": (lambda: torch.empty(COUNT).cauchy_(1.0, 2.0), stats.cauchy(1, 2)),
    "log_normal_": (lambda: torch.empty(COUNT).log_normal_(0.5, 0.25), stats.lognorm(0.25, scale=math.exp(0.5))),
    "geometric_": (lambda: torch.empty(COUNT).geometric_(0.3), stats.geom(0.3)),
    "randint": (lambda: torch.randint(-3, 8, (COUNT,)), stats.randint(-3, 8)),
    "randint_of_many": (lambda: torch.randint(0, 2**40, (COUNT,)), stats.uniform(0, 2**40)),
    "randint_like": (lambda: torch.randint_like(torch.empty(COUNT, dtype=torch.int32), 7), stats.randint(0, 7)),
    "random_": (lambda: torch.empty(COUNT, dtype=torch.uint8).random_(), stats.randint(0, 256)),
    "random_from_to": (lambda: torch.empty(COUNT, dtype=torch.int64).random_(-2, 9), stats.randint(-2, 9)),
    "bernoulli": (lambda: torch.bernoulli(torch.full((COUNT,), 0.3)), stats.bernoulli(0.3)),
    "bernoulli_float64": (
        lambda: torch.bernoulli(torch.full((COUNT,), 0.3, dtype=torch.float64)),
        stats.bernoulli(0.3),
    ),
    "bernoulli_": (lambda: torch.empty(COUNT, dtype=torch.bool).bernoulli_(0.3).int(), stats.bernoulli(0.3)),
    "dropout": (lambda: F.dropout(torch.ones(COUNT), 0.25) * 0.75, stats.bernoulli(0.75)),
    "native_dropout": (lambda: torch.native_dropout(torch.ones(COUNT), 0.25, True)[1].int(), stats.bernoulli(0.75)),
    "multinomial": (
        lambda: torch.multinomial(WEIGHTS, COUNT, replacement=True),
        stats.rv_discrete(values=(range(5), [0, 0.125, 0.25, 0, 0.625])),
    ),
    "multinomial_of_one": (
        lambda: torch.multinomial(WEIGHTS.expand(COUNT, 5), 1),
        stats.rv_discrete(values=(range(5), [0, 0.125, 0.25, 0, 0.625])),
    ),
    "multinomial_second_without_replacement": (
        lambda: torch.multinomial(WEIGHTS.expand(COUNT, 5), 2)[:, 1].contiguous(),
        # P(second is j) = the sum over i != j of p_i p_j / (1 - p_i)
        stats.rv_discrete(values=(range(5), [0, 0.25, 1 / 28 + 5 / 12, 0, 1 - 0.25 - 1 / 28 - 5 / 12])),
    ),
}


def fits(drawn: Tensor, distribution: Any) -> float:
    """The p-value of a Kolmogorov-Smirnov or chi-squared test."""
    values = drawn.double().numpy().ravel()
    if not hasattr(getattr(distribution, "dist", distribution), "pmf"):
        return float(stats.kstest(values, distribution.cdf).pvalue)
    places, counts = np.unique(values, return_counts=True)
    expected = distribution.pmf(places) * len(values)
    assert (expected > 0).all(), f"impossible values among {places}"
    often = expected >= 5
    left = len(values) - expected[often].sum()
    observed = np.append(counts[often], counts[~often].sum())
    rest = np.append(expected[often], left)
    keep = rest > 1e-6 * len(values)
    assert observed[~keep].sum() == 0
    return float(stats.chisquare(observed[keep], rest[keep] * observed[keep].sum() / rest[keep].sum()).pvalue)


def compile_alone(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", options={"fallback": "error", **options})


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_the_generator_gives_the_words_its_authors_publish(key: Any, counter: Any, words: Any) -> None:
    packed = torch.tensor([key[0] | key[1] << 32], dtype=torch.uint64).view(torch.int64)[0]
    assert tuple(map(int, ops._threefry(packed, *map(torch.tensor, counter)))) == words
    with jax.enable_x64(True):
        assert tuple(map(int, rules.threefry(jnp.int64(int(packed)), *map(jnp.uint32, counter)))) == words


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["uniform", "normal", "bits"])
def test_xla_and_eager_draw_the_same(kind: str, dtype: torch.dtype) -> None:
    if kind == "bits":
        dtype = torch.int64
    key = torch.tensor(0x1234_5678_9ABC_DEF0)

    def draw(key: Tensor) -> Tensor:
        return torch.ops.dynaxla.random(key, [7, 5, 11], kind, dtype)  # type: ignore[no-any-return]

    mine, eager = compile_alone(draw)(key), draw(key)
    if kind == "normal":
        assert_close(mine, eager)
    else:
        assert torch.equal(mine, eager)
    padded = torch.ops.dynaxla.random(key, [8, 8, 16], kind, dtype, torch.tensor([7, 5, 11]))
    assert torch.equal(padded[:7, :5, :11], eager)


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str, recorder: Recorder) -> None:
    draw, distribution = DRAWS[name]
    compiled = compile_alone(draw)
    with recorder.expect(compiles=1):
        first = compiled()
    state = torch.get_rng_state()
    with recorder.expect(compiles=0):
        second = compiled()
    assert not torch.equal(first, second), "every call draws anew"
    assert not torch.equal(torch.get_rng_state(), state), "the generator has advanced"
    torch.set_rng_state(state)
    assert torch.equal(compiled(), second), "a generator in the same state gives the same"
    expected = draw()
    assert (first.dtype, first.shape, first.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert fits(first, distribution) > UNLIKELY
    assert fits(expected, distribution) > UNLIKELY, "eager itself does not pass this test"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_draws_stay_in_their_range(dtype: torch.dtype) -> None:
    drawn = compile_alone(lambda: torch.rand(COUNT, dtype=dtype))()
    assert 0 <= drawn.min() < drawn.max() < 1
    kept = compile_alone(lambda: F.dropout(torch.ones(COUNT, dtype=dtype), 0.1))() != 0
    assert stats.binomtest(int(kept.sum()), COUNT, 0.9).pvalue > UNLIKELY


def test_randperm_gives_every_order_as_often() -> None:
    compiled = compile_alone(lambda: torch.stack([torch.randperm(4) for _ in range(50)]))
    orders = torch.cat([compiled() for _ in range(48)])
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand_as(orders))
    _, counts = torch.unique(orders, dim=0, return_counts=True)
    assert stats.chisquare(counts.numpy()).pvalue > UNLIKELY
    assert len(counts) == math.factorial(4)


def test_draws_of_one_graph_are_independent() -> None:
    drawn = compile_alone(lambda: torch.stack([torch.randn(COUNT) for _ in range(4)]))()
    correlations = torch.corrcoef(drawn) - torch.eye(4)
    assert correlations.abs().max() < 5 / COUNT**0.5


def test_neighbouring_seeds_give_independent_numbers() -> None:
    draw = compile_alone(lambda key: torch.ops.dynaxla.random(key, [COUNT], "normal", torch.float32))
    drawn = torch.stack([draw(torch.tensor(key)) for key in (0, 1, 2, 1 << 32, -1)])
    correlations = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlations.abs().max() < 5 / COUNT**0.5


def test_a_bucket_does_not_change_the_numbers(recorder: Recorder) -> None:
    def draw(x: Tensor) -> tuple[Tensor, ...]:
        batch, length = x.shape
        return (
            torch.rand(batch, length),
            torch.randn_like(x),
            F.dropout(x, 0.5),
            torch.randint(0, 100, (length, batch)),
            torch.randperm(length),
            torch.multinomial(x.abs() + 1, 2),
            torch.multinomial(x.abs() + 1, 5, replacement=True),
            torch.rand(batch * length),
            torch.rand(40 - length, batch),  # falls as a size grows: more elements than at the bucket's sizes
        )

    options: dict[str, Any] = {"fallback": "error", "bucketing": "require", "buckets": dynaxla.Explicit((8, 16))}
    padded = torch.compile(draw, backend="dynaxla", dynamic=True, options=options)
    exact = torch.compile(draw, backend="dynaxla", dynamic=True, options={"bucketing": "off"})
    padded(torch.randn(3, 9))
    for batch, length in ((5, 11), (7, 16), (8, 13)):
        x = torch.randn(batch, length)
        with recorder.expect(compiles=0):
            mine = _seeded(padded, x)
        for one, other in zip(mine, _seeded(exact, x), strict=True):
            assert_close(one, other)


def _seeded(function: Callable[..., Any], *args: Any, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return function(*args)


def test_the_graph_in_eager_draws_the_same() -> None:
    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return F.dropout(x, 0.5), torch.rand_like(x), torch.randint(0, 9, (4,)), torch.multinomial(x.abs(), 3)

    x = torch.randn(6, 10)
    for mine, other in zip(
        _seeded(compile_alone(draw), x),
        _seeded(torch.compile(draw, backend="dynaxla", options={"executor": "eager"}), x),
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_backward_sees_what_the_forward_drew(dynamic: bool, recorder: Recorder) -> None:
    compiled = torch.compile(
        lambda x: F.dropout(x, 0.5) + torch.rand_like(x) * x,
        backend="dynaxla",
        dynamic=dynamic,
        options={"fallback": "error"},
    )
    for size in (40, 41):
        x = torch.ones(size, 50, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert x.grad is not None
        assert_close(x.grad, y.detach())  # linear, at ones
        first, x.grad = y.detach(), None
        compiled(x).sum().backward()
        assert x.grad is not None
        assert not torch.equal(x.grad, first)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.second(F.dropout(F.gelu(self.first(x)), 0.3)), 0.3)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rng", ["compiled", "eager"])
def test_a_checkpoint_draws_again_what_it_drew(inside: bool, reentrant: bool, rng: str) -> None:
    def squares(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).square() * torch.rand_like(x)

    def apply(x: Tensor) -> Tensor:
        made: Tensor = checkpoint(squares, x, use_reentrant=reentrant)
        return made

    compiled = torch.compile(apply if inside else squares, backend="dynaxla", options={"rng": rng})
    x = torch.ones(COUNT, requires_grad=True)
    y = compiled(x) if inside else checkpoint(compiled, x, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad is not None
    assert_close(x.grad, 2 * y.detach())


class DrawsBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


def test_a_backward_that_draws_draws_at_every_run() -> None:
    x = torch.ones(COUNT, requires_grad=True)
    y = compile_alone(lambda x: DrawsBackward.apply(x) * torch.rand(()))(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_layers_draw_different_masks() -> None:
    masks = compile_alone(lambda x: torch.stack([F.dropout(x, 0.5) for _ in range(6)]))(torch.ones(1000)) != 0
    assert torch.corrcoef(masks.float()).fill_diagonal_(0).abs().max() < 0.2


@torch.compiler.nested_compile_region
def _halves(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def test_calls_of_one_region_draw_different_masks(recorder: Recorder) -> None:
    compiled = compile_alone(lambda x: torch.stack([_halves(x) for _ in range(4)]))
    x = torch.ones(COUNT, requires_grad=True)
    with recorder.expect(eager_ops=0):
        drawn = compiled(x)
    assert (torch.corrcoef(drawn.detach()) - torch.eye(4)).abs().max() < 5 / COUNT**0.5
    (gradient,) = torch.autograd.grad(drawn.sum(), x)
    assert_close(gradient, drawn.detach().sum(0))


@pytest.mark.parametrize("name", DRAWS)
def test_eager_numbers_on_request(name: str) -> None:
    draw = DRAWS[name][0]
    compiled = torch.compile(draw, backend="dynaxla", options={"rng": "eager"})
    for seed in (1, 2):
        assert torch.equal(_seeded(compiled, seed=seed), _seeded(draw, seed=seed))


def test_eager_numbers_of_a_network_on_request() -> None:
    block = Block()
    compiled = torch.compile(block, backend="dynaxla", options={"rng": "eager"})
    x = torch.randn(8, 16)
    results = [torch.autograd.grad(_seeded(f, x).square().sum(), list(block.parameters())) for f in (compiled, block)]
    for mine, eager in zip(*results, strict=True):
        assert_close(mine, eager)


def test_a_generator_of_the_users_own_draws_eager_numbers() -> None:
    def draw(generator: torch.Generator) -> Tensor:
        return torch.rand(5, generator=generator) + 1

    compiled = torch.compile(draw, backend="dynaxla")
    assert torch.equal(*(f(torch.Generator().manual_seed(4)) for f in (compiled, draw)))


def test_wrong_parameters_raise_as_in_eager_or_unchecked_give_nan() -> None:
    x = torch.ones(5)
    with pytest.raises(RuntimeError, match="p"):
        torch.compile(lambda x: torch.empty_like(x).bernoulli_(1.5), backend="dynaxla")(x)
    with pytest.raises(RuntimeError, match="from"):
        torch.compile(lambda: torch.randint(5, 5, (3,)), backend="dynaxla")()
    chances = torch.tensor([0.5, 1.5, -0.1, math.nan])
    assert _draw_refused(torch.bernoulli, chances).isnan().tolist() == [False, True, True, True]
    drawn = _draw_refused(lambda s: torch.normal(0.0, s), torch.tensor([1.0, -1.0]))
    assert drawn.isnan().tolist() == [False, True]
    rows = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]])
    for replacement in (False, True):
        chosen = _draw_refused(lambda w, r=replacement: torch.multinomial(w, 2, replacement=r), rows)
        assert (chosen == NO_CHOICE).all(1).tolist() == [False, True, True, True, True]


def _draw_refused(function: Callable[..., Any], parameters: torch.Tensor) -> torch.Tensor:
    """What is drawn where values are not checked; else it raises, as eager does."""
    for refuses in (function, compile_alone(function)):
        with pytest.raises(RuntimeError):
            refuses(parameters)
    return compile_alone(function, value_checks=False)(parameters)  # type: ignore[no-any-return]


def test_edges() -> None:
    assert compile_alone(lambda x: F.dropout(x, 0.0))(torch.ones(9)).sum() == 9
    assert compile_alone(lambda x: F.dropout(x, 1.0))(torch.ones(9)).sum() == 0
    assert compile_alone(lambda: torch.rand(0, 4))().shape == (0, 4)
    assert compile_alone(lambda: torch.rand(()))().shape == ()
    assert compile_alone(lambda: torch.randint(2**62, 2**63 - 1, (9,)))().min() >= 2**62
    assert torch.equal(compile_alone(torch.bernoulli)(torch.tensor([0.0, 1.0])), torch.tensor([0.0, 1.0]))


BAD: dict[str, Callable[[], Any]] = {
    "integers that the dtype does not hold": lambda: torch.randint(0, 300, (5,), dtype=torch.uint8),
    "negative integers without a sign": lambda: torch.randint(-3, 5, (5,), dtype=torch.uint8),
    "a longer permutation than the dtype holds": lambda: torch.randperm(300, dtype=torch.uint8),
    "chances that are integers": lambda: torch.bernoulli(torch.ones(5, dtype=torch.int64)),
    "dropping more than all": lambda: torch.native_dropout(torch.ones(5), 1.5, True),
    "dropout of integers": lambda: torch.native_dropout(torch.ones(5, dtype=torch.int64), 0.5, True),
    "choices of three dims": lambda: torch.multinomial(torch.ones(2, 3, 4), 2),
    "no choice": lambda: torch.multinomial(torch.ones(4), 0),
    "more choices than there are": lambda: torch.multinomial(torch.ones(4), 5),
}


@pytest.mark.parametrize("name", BAD)
def test_what_eager_refuses_is_refused(name: str) -> None:
    for function in (BAD[name], torch.compile(BAD[name], backend="dynaxla")):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function()


def test_dropout_that_says_nothing_of_training_drops() -> None:
    drop = compile_alone(lambda x: torch.native_dropout(x, 0.5, None))
    for dropped, kept in (drop(torch.ones(COUNT)), torch.native_dropout(torch.ones(COUNT), 0.5, None)):
        assert 0.4 < kept.float().mean() < 0.6
        assert torch.equal(dropped, kept * 2.0)
