"""Functions that are arithmetic on the CPU are as near to the true number as a float32 is, for every exponent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
import scipy.special

from dynaxla.ops import error_functions, transcendental, vector_functions

_LEAST = np.float32(2.0**-126)  # subnormal numbers count as zero (docs/precision.md)
_SPECIAL = [
    0,
    -0.0,
    1,
    -1,
    0.5,
    -0.5,
    2,
    -2,
    3,
    -3,
    2.5,
    np.inf,
    -np.inf,
    np.nan,
    1e38,
    -1e38,
    3.4e38,
    1.0000001,
    0.9999999,
]
_SPECIAL += [
    16777216,
    -16777215,
    8388607.5,
    _LEAST,
    -_LEAST,
    16367173 * 2.0**72,
]  # the last is nearly a multiple of pi / 2

Function = Callable[..., np.ndarray]


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _numbers(seed: int) -> np.ndarray:
    """Floats of every exponent, of usual sizes, around multiples of pi / 2, and special ones."""
    random = np.random.default_rng(seed)
    every = random.integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    usual = [random.standard_normal(50_000) * scale for scale in (1, 100, 1e5)]
    multiples = (np.arange(-20_000, 20_000) * (np.pi / 2)).astype(np.float32)
    beside = [multiples, np.nextafter(multiples, np.float32(9e9)), np.nextafter(multiples, np.float32(-9e9))]
    with np.errstate(invalid="ignore"):  # signaling NaNs
        numbers = np.concatenate([every, *usual, *beside, _SPECIAL]).astype(np.float32)
    return numbers[(np.abs(numbers) >= _LEAST) | (numbers == 0) | np.isnan(numbers)]


def _check(function: Function, true: Function, units: float, *arguments: np.ndarray) -> None:
    given = np.asarray(jax.jit(function)(*arguments))
    assert given.dtype == np.float32
    with np.errstate(all="ignore"):
        expected = true(*(a.astype(np.float64) for a in arguments))
        rounded = expected.astype(np.float32)
        distance = np.abs(given.astype(np.float64) - expected) / np.spacing(np.abs(rounded)).astype(np.float64)
    is_equal = (given == rounded) & (np.signbit(given) == np.signbit(rounded)) | (np.isnan(given) & np.isnan(rounded))
    is_tiny = (np.abs(expected) < _LEAST) & (np.abs(given) <= _LEAST)
    wrong = ~(is_equal | is_tiny | (distance < units))
    assert not wrong.any(), [(*(a[wrong][0] for a in arguments), given[wrong][0], expected[wrong][0]), wrong.sum()]


@pytest.mark.parametrize(
    ("name", "true", "units"),
    [
        ("sin", np.sin, 1.5),
        ("cos", np.cos, 1.5),
        ("tan", np.tan, 0.6),
        ("atan", np.arctan, 0.6),
        ("asin", np.arcsin, 0.6),
        ("acos", np.arccos, 0.6),
        ("exp2", np.exp2, 1.0),
        ("log1p", np.log1p, 1.5),
    ],
)
def test_functions_of_one_number(name: str, true: Function, units: float) -> None:
    _check(getattr(vector_functions, name), true, units, _numbers(0))


@pytest.mark.parametrize(("name", "true"), [("atan2", np.arctan2), ("power", np.power), ("fmod", np.fmod)])
def test_functions_of_two_numbers(name: str, true: Function) -> None:
    random = np.random.default_rng(1)
    pairs = np.meshgrid(np.asarray(_SPECIAL, np.float32), np.asarray(_SPECIAL, np.float32))
    first, second = (np.concatenate([_numbers(2 + i), pair.ravel()]) for i, pair in enumerate(pairs))
    size = min(len(first), len(second))
    function = getattr(vector_functions, name)
    _check(function, true, 0.6, random.permutation(first[-size:]), second[-size:])
    _check(function, true, 0.6, *(pair.ravel() for pair in pairs))
    near = (np.abs(random.standard_normal(100_000)) * 50).astype(np.float32)
    _check(function, true, 0.6, near, (random.standard_normal(100_000) * 8).astype(np.float32))


def test_remainders_of_small_quotients() -> None:
    """No quotient is so large that all of them are XLA's."""
    random = np.random.default_rng(3)
    divisors = _numbers(4)
    steps = np.exp2(random.uniform(-3, 27, len(divisors))) * random.choice([-1, 1], len(divisors))
    whole = np.where(random.random(len(divisors)) < 0.5, np.trunc(steps), steps)
    with np.errstate(all="ignore"):
        numbers = (divisors * whole).astype(np.float32)
        beside = np.nextafter(numbers, np.float32(0))
    for each in (numbers, beside):
        _check(vector_functions.fmod, np.fmod, 0.6, each, divisors)


@pytest.mark.parametrize(
    ("function", "true", "units", "least"),
    [
        (error_functions.erfc, scipy.special.erfc, 9, -np.inf),
        (error_functions.erfcx, scipy.special.erfcx, 7, -9.3),
        (error_functions.erfinv, scipy.special.erfinv, 4, -1),
        (transcendental.lgamma, scipy.special.gammaln, 4, 0),
    ],
)
def test_special_functions(function: Function, true: Function, units: float, least: float) -> None:
    random = np.random.default_rng(5)
    beside_one = 1 - np.exp2(random.uniform(-24, -1, 50_000))
    numbers = np.concatenate([_numbers(6), beside_one, -beside_one, random.uniform(-12, 12, 200_000)]).astype(
        np.float32
    )
    _check(function, true, units, numbers[(numbers >= least) | np.isnan(numbers)])


def test_a_zero_has_its_sign() -> None:
    zeros = np.array([0.0, -0.0], np.float32)
    for name in ("sin", "tan", "atan", "asin", "log1p"):
        assert np.signbit(getattr(vector_functions, name)(zeros)).tolist() == [False, True]
