"""Operators that are made with `torch.library.custom_op`, and the autograd formulas of operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

from dynaxla.torch_api.overloads import OpOverload, family, full_name

__all__ = ["CustomOpDef"]  # what torch.library.custom_op gives

NATIVE: Final = "a kernel"
"""In the place of a formula that is no Python function of `torch.library.register_autograd`."""


def overload_of(definition: CustomOpDef) -> OpOverload:
    """The operator that was made. Relies on `CustomOpDef._opoverload`."""
    return definition._opoverload


def made_names() -> Iterable[str]:
    """The names of all that were made, "mylib::myop". Relies on the registry `torch._library.custom_ops.OPDEFS`."""
    return tuple(OPDEFS)


def formula_of(op: OpOverload) -> object | None:
    """An operator's autograd formula: the function that was registered, `NATIVE`, or None.

    Relies on `OPDEFS`, on `CustomOpDef._backward_fn`, which `register_autograd` sets, and on the key Autograd of kernels.
    """
    definition = OPDEFS.get(family(op))
    if definition is not None:
        return definition._backward_fn  # type: ignore[no-any-return]
    return NATIVE if torch._C._dispatch_has_kernel_for_dispatch_key(full_name(op), "Autograd") else None
