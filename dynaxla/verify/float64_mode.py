"""Eager PyTorch in float64, whatever dtypes the code names: the reference by which two results are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynaxla.custom_ops.threefry import RANDOM
from dynaxla.torch_api.pytree import tree_map
from dynaxla.torch_api.tracing import TorchDispatchMode

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""The dtypes that are computed in a wider one."""


class Float64Mode(TorchDispatchMode):
    """Runs every op of its block in float64: floats among the operands are widened, and so is a dtype that a call names.

    A tensor that the block finds (a parameter, a constant) is copied once, so that what the block writes into it is read
    again, and the tensor itself stays as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        draws = func is RANDOM or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        change = self._widen_tensor if draws else self._widen  # in float64 they would draw other numbers
        return func(*tree_map(change, args), **tree_map(change, dict(kwargs or {})))

    def _widen(self, value: Any) -> Any:
        return WIDER.get(value, value) if isinstance(value, torch.dtype) else self._widen_tensor(value)

    def _widen_tensor(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in WIDER:
            return value
        if id(value) not in self._wide:
            self._wide[id(value)] = value, widen(value)  # holds the tensor, so that no other gets its id
        return self._wide[id(value)][1]


def widen(value: Tensor) -> Tensor:
    """A tensor of another dtype, float64 or complex128, with the same values, if it is of a narrower float."""
    return value.detach().to(WIDER[value.dtype]) if value.dtype in WIDER else value
