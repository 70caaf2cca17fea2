"""Arithmetic of complex numbers, with the signs of its zeros, by which a root or a logarithm behind it chooses its branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

PARTS = (0.0, -0.0, 1.0, -1.0, 2.0, -4.0, 0.3)
SPECIAL = (torch.inf, -torch.inf, torch.nan, 0.0, 1.0)
POWERS = (0, 1, 2, 3, -1, -2, 0.5, 0j, 2 + 0j)


def numbers(parts: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor([complex(a, b) for a in parts for b in parts], dtype=dtype)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"to the power {p}": lambda z, p=p: z**p for p in POWERS},  # type: ignore[misc]
    "square": torch.square,
    "power in double": lambda z: torch.float_power(z, 2),
    "half": lambda z: z / 2,
    "quotient": lambda z: z / torch.full_like(z, -2 + 1j),
    "by zero": lambda z: z / 0,
    "of one": lambda z: 1 / (z + 3j),
    "less one": lambda z: z - 1,
    "one less": lambda z: 1 - z,
    "difference": lambda z: z - z.flip(0),
    "with a factor": lambda z: torch.sub(z, z.conj(), alpha=2) + torch.add(z, z, alpha=0.5),
    "real part": lambda z: z + z.real,
    "times": lambda z: z.conj() * 1,
    "exponential": torch.exp,
    "tangent": torch.tanh,
    "root of a square": lambda z: (z.square() + 1).sqrt(),
    "root of a half": lambda z: (z / 2).sqrt(),
    "root of a difference": lambda z: (z - 1).sqrt(),
}
OF_SPECIAL = ("less one", "one less", "real part", "by zero", "to the power 0", "to the power 1")


def results(names: Sequence[str]) -> Callable[[Tensor], list[Tensor]]:
    return lambda z: [FUNCTIONS[name](z) for name in names]


def check(names: Sequence[str], z: Tensor, recorder: Recorder) -> None:
    with recorder.expect(eager_ops=0):
        actual = torch.compile(results(names), backend="dynaxla", dynamic=False)(z)
    for name, mine, eager in zip(names, actual, results(names)(z), strict=True):
        mine, eager = (torch.view_as_real(part.resolve_conj()) for part in (mine, eager))
        assert_close(mine, eager)
        zeros = eager == 0
        assert torch.equal(mine[zeros].signbit(), eager[zeros].signbit()), name


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_zeros_have_their_signs(dtype: torch.dtype, recorder: Recorder) -> None:
    check(list(FUNCTIONS), numbers(PARTS, dtype), recorder)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_zero_times_infinity_is_nan(dtype: torch.dtype, recorder: Recorder) -> None:
    check(OF_SPECIAL, numbers(SPECIAL, dtype), recorder)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_gradients_of_powers_at_zero(power: int) -> None:
    gradients = []
    for run in (lambda z: z**power, torch.compile(lambda z: z**power, backend="dynaxla")):
        z = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
        (run(z) * torch.tensor([1, 2j, -1])).real.sum().backward()
        gradients.append(z.grad)
    assert_close(*gradients)
