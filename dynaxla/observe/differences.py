"""How close a result must be to eager's: one table, one row per dtype; and how far a result is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RELATIVE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 0.125,  # the step from one number to the next
    torch.float8_e5m2: 0.25,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}
"""Largest allowed error relative to the largest finite magnitude of the expected tensor. Other dtypes are exact."""

_LEAST_SCALE = 1e-30


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a value is from the expected one.

    Attributes:
        absolute: the largest difference of two finite elements.
        relative: the same, divided by the largest finite magnitude of the expected tensor.
        tolerance: the largest `relative` that is allowed; 0: the dtype is exact.
        problem: what else is wrong: the kind of value, shape, dtype, or where NaN and infinities are; empty if nothing is.
    """

    absolute: float = 0.0
    relative: float = 0.0
    tolerance: float = 0.0
    problem: str = ""

    @property
    def is_close(self) -> bool:
        """Whether the value is as close as its dtype asks for."""
        return not self.problem and self.relative <= self.tolerance

    def __str__(self) -> str:
        off = f"off by {self.absolute:.3e}, {self.relative:.1e} of the largest magnitude, tolerance {self.tolerance:g}"
        return self.problem or off


def measure_difference(actual: Any, expected: Any) -> Difference:
    """Measures how far a value is from the expected one. Tensors may have any shape and dtype, and lie on different devices."""
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        is_same = type(actual) is type(expected) and (actual is expected or actual == expected)
        return Difference() if is_same else Difference(problem=f"{actual!r}, expected {expected!r}")
    if actual.shape != expected.shape:
        return Difference(problem=f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.dtype is not expected.dtype:
        return Difference(problem=f"dtype {actual.dtype}, expected {expected.dtype}")
    with torch.no_grad():
        return _measure(_to_host(actual), _to_host(expected))


def find_differences(actual: Sequence[Any], expected: Sequence[Any]) -> dict[int, Difference]:
    """The values that are not close to the expected ones, by position. An expected None is not compared."""
    if len(actual) != len(expected):
        return {0: Difference(problem=f"{len(actual)} values, expected {len(expected)}")}
    pairs = enumerate(zip(actual, expected, strict=True))
    found = {i: measure_difference(mine, wanted) for i, (mine, wanted) in pairs if wanted is not None}
    return {i: difference for i, difference in found.items() if not difference.is_close}


def _measure(actual: Tensor, expected: Tensor) -> Difference:
    """Compares two tensors of the host of one shape and one dtype."""
    tolerance = RELATIVE.get(expected.dtype, 0.0)
    if torch.equal(actual, expected):
        return Difference(tolerance=tolerance)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    mine, wanted = actual.to(wide), expected.to(wide)
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(mine), finite):
        return Difference(tolerance=tolerance, problem="finite in other places than expected")
    if not bool((finite | (mine == wanted) | (mine.isnan() & wanted.isnan())).all()):
        return Difference(tolerance=tolerance, problem="NaN and infinities in other places than expected")
    if not bool(finite.any()):
        return Difference(tolerance=tolerance)
    absolute = (mine[finite] - wanted[finite]).abs().max().item()
    relative = absolute / max(wanted[finite].abs().max().item(), _LEAST_SCALE)
    if not tolerance and not relative:
        return Difference(problem="integers differ by less than float64 tells apart")
    return Difference(absolute, relative, tolerance)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").resolve_conj().resolve_neg()
