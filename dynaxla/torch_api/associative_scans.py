"""`associative_scan` (generic) over a size that varies: captured for sizes up to a power of two, not for each size.

torch's implementation halves the size again and again, and asks each time whether it is even: Dynamo captures it anew for
nearly every size, for as many lengths of prompts as a state space model meets.

Relies on `generic_associative_scan`, which `associative_scan` finds in its module and Dynamo goes through, on its arguments,
and on `torch.compiler.assume_constant_result`.
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
_MODULE = "torch._higher_order_ops.associative_scan"  # torch._higher_order_ops has a function of this name


@cache
def capture_scans() -> None:
    """Has Dynamo capture generic scans so for this package's backend, once per process."""
    module: Any = sys.modules[_MODULE]
    scan = module.generic_associative_scan

    def scanned(
        operator: Callable[..., Any], leaves: Sequence[Tensor], dim: int = 0, additional_inputs: tuple[Any, ...] = ()
    ) -> Any:
        if not torch.compiler.is_compiling() or not _is_ours():
            return scan(operator, leaves, dim, additional_inputs)
        size = leaves[0].shape[dim]
        width = _SMALLEST
        while width < size:
            width *= 2
        # What comes behind the last element reaches none before it, and is real: nothing in it divides by zero.
        places = torch.arange(width, device=leaves[0].device).clamp(max=size - 1)
        wide = scan(operator, [leaf.index_select(dim, places) for leaf in leaves], dim, additional_inputs)
        return [leaf.narrow(dim, 0, size) for leaf in wide]

    module.generic_associative_scan = scanned


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_ours() -> bool:
    at = variables_of("_compile", "torch._dynamo.convert_frame")
    return at is not None and is_ours(at["compiler_fn"])
