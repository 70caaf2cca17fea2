"""Whether a backend's results are eager's, by the tolerance of their dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from dynaxla.observe.differences import RELATIVE, measure_difference
from dynaxla.torch_api.pytree import tree_leaves

LEAST_SHARE = 1e-2


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
        sizes = [
            each[each.isfinite()].abs().max().item() for each in _tensors(expected.gradients) if each.isfinite().any()
        ]
        gradients = _compare_all(
            actual.gradients, expected.gradients, tolerance, LEAST_SHARE * max(sizes, default=0.0) + 1e-30
        )
        worst = max(found.error, gradients.error)
        return Check(gradients.status, worst, f"gradients: {gradients.message}" if gradients.message else "")
    return _compare_all(actual, expected, tolerance, 1e-30)


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
