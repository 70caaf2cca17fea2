"""Captures `associative_scan` (generic) over a dynamic size once for each power of two, instead of once for each size.

torch's implementation halves the size repeatedly, with a guard each time on whether it is even: Dynamo captures it
again for nearly every size, so for nearly every prompt length of a state space model.

Relies on `generic_associative_scan`, which `associative_scan` looks up in its module and Dynamo traces, on its
arguments, and on `torch.compiler.assume_constant_result`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.dynamo import is_ours
from dynaxla.torch_api.frames import variables_of

_SMALLEST = 64
_MODULE = "torch._higher_order_ops.associative_scan"  # torch._higher_order_ops.associative_scan is a function


@cache
def capture_scans() -> None:
    """Has Dynamo capture generic scans padded to a power of two for this package's backend, once per process."""
    module: Any = sys.modules[_MODULE]
    scan = module.generic_associative_scan

    def padded_scan(
        operator: Callable[..., Any], leaves: Sequence[Tensor], dim: int = 0, additional_inputs: tuple[Any, ...] = ()
    ) -> Any:
        if not torch.compiler.is_compiling() or not _is_ours():
            return scan(operator, leaves, dim, additional_inputs)
        size = leaves[0].shape[dim]
        width = _SMALLEST
        while width < size:
            width *= 2
        # The padding repeats the last element: results of earlier elements do not depend on it, and it causes no
        # division by zero.
        indices = torch.arange(width, device=leaves[0].device).clamp(max=size - 1)
        wide = scan(operator, [leaf.index_select(dim, indices) for leaf in leaves], dim, additional_inputs)
        return [leaf.narrow(dim, 0, size) for leaf in wide]

    module.generic_associative_scan = padded_scan


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_ours() -> bool:
    at = variables_of("_compile", "torch._dynamo.convert_frame")
    return at is not None and is_ours(at["compiler_fn"])
