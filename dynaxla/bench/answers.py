"""Whether a backend's results are eager's, by the tolerance of their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from dynaxla.observe.differences import RELATIVE, measure_difference
from dynaxla.torch_api.pytree import tree_leaves

LEAST_SHARE = 1e-2

AS_NEAR = 2.0
"""Errors may be so many times eager's where both are compared with float64."""


@dataclass(frozen=True, slots=True)
class Check:
    """The comparison of a backend's results with those of the baseline.

    Attributes:
        status: "same"; "differs" beyond the tolerance; "random": the baseline, run again, differs from itself; "failed": the
            backend raised; "unchecked": nothing to compare.
        error: the largest, relative to the largest magnitude of its tensor.
        message: of what differs, or was raised.
    """

    status: Literal["same", "differs", "random", "failed", "unchecked"]
    error: float = 0.0
    message: str = ""

    @property
    def is_bad(self) -> bool:
        return self.status in ("differs", "failed")


class TrainingAnswer(NamedTuple):
    """Results of a forward, and gradients.

    A gradient may be nothing but rounding, as that of a key's bias, which is 0 in exact arithmetic. So errors of gradients are
    relative to `LEAST_SHARE` of the largest gradient at least.
    """

    results: Any
    gradients: Any


def compare_answers(actual: Any, expected: Any, tolerance: float | None = None) -> Check:
    """Compares the tensors and numbers of two nested results, in order; other values do not count.

    Args:
        tolerance: largest relative error of tensors of floats; None: that of their dtype.
    """
    if isinstance(expected, TrainingAnswer) and isinstance(actual, TrainingAnswer):
        found = _compare_all(actual.results, expected.results, tolerance, 1e-30)
        if found.is_bad:
            return found
        largest = max(map(_largest, _tensors(expected.gradients)), default=0.0)
        gradients = _compare_all(actual.gradients, expected.gradients, tolerance, LEAST_SHARE * largest + 1e-30)
        worst = max(found.error, gradients.error)
        return Check(gradients.status, worst, f"gradients: {gradients.message}" if gradients.message else "")
    return _compare_all(actual, expected, tolerance, 1e-30)


def judge_by_float64(check: Check, actual: Any, expected: Any, run: Callable[[], Any]) -> Check:
    """A result that differs from eager's may be the better one: gradients through many normalizations of few values, say.

    Args:
        check: says that the results differ.
        run: gives the results in float64.

    Returns:
        That they are the same, if in each tensor the root mean square of its errors is at most `AS_NEAR` times that of eager's.
    """
    try:
        exact = run()
    except Exception as error:  # of a user's model, which may refuse float64 in any way
        return replace(check, message=f"{check.message}; not judged by float64: {type(error).__name__}: {error}"[:2000])
    tensors = [list(_tensors(each)) for each in (actual, expected, exact)]
    if len({tuple(each.shape for each in found) for found in tensors}) > 1:
        return check
    largest = max(_largest(each) for each in tensors[2])
    if all(_is_as_near(mine, theirs, wide, largest) for mine, theirs, wide in zip(*tensors, strict=True)):
        return Check("same", check.error, "beyond the tolerance, and as near to float64 as the baseline")
    return check


def _is_as_near(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, largest: float) -> bool:
    """`largest`: the largest magnitude of all tensors, of which some may be nothing but rounding."""
    found, wanted = measure_difference(mine, theirs), measure_difference(theirs.to(exact.dtype), exact)
    if found.is_close or found.problem or wanted.problem:
        return found.is_close
    where = exact.isfinite()
    error, eager = (
        (each.to(exact.dtype) - exact)[where].abs().square().mean().sqrt().item() for each in (mine, theirs)
    )
    return error <= AS_NEAR * eager + LEAST_SHARE * found.tolerance * largest


def _largest(tensor: torch.Tensor) -> float:
    found = tensor[tensor.isfinite()]
    return found.abs().max().item() if found.numel() else 0.0


def _compare_all(actual: Any, expected: Any, tolerance: float | None, least: float) -> Check:
    """`least`: errors are relative to the largest magnitude of a tensor, or to this if it is smaller."""
    mine, theirs = list(_tensors(actual)), list(_tensors(expected))
    if len(mine) != len(theirs):
        return Check("differs", message=f"{len(mine)} tensors, expected {len(theirs)}")
    if not theirs:
        return Check("unchecked", message="there is no tensor among the results")
    worst = 0.0
    for number, (tensor, wanted) in enumerate(zip(mine, theirs, strict=True)):
        found = measure_difference(tensor, wanted)
        error = found.absolute / max(found.absolute / found.relative, least) if found.relative else 0.0
        limit = RELATIVE.get(wanted.dtype, 0.0) if tolerance is None or wanted.dtype not in RELATIVE else tolerance
        worst = max(worst, error)
        if found.problem or error > limit:
            said = found.problem or f"off by {error:.2e} of the largest value, allowed {limit:.0e}"
            return Check("differs", worst, f"result {number}, {tuple(wanted.shape)} {wanted.dtype}: {said}")
    return Check("same", worst)


def _tensors(results: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(results):
        if isinstance(leaf, torch.Tensor):
            yield leaf.detach().cpu()
        elif isinstance(leaf, bool | int | float):
            yield torch.tensor(leaf, dtype=torch.float32 if isinstance(leaf, float) else None)
