"""Operators defined with `torch.library.custom_op`, and the autograd formulas of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

from dynaxla.torch_api.overloads import OpOverload, family, full_name

__all__ = ["CustomOpDef"]  # returned by torch.library.custom_op

NATIVE: Final = "a kernel"
"""Returned by `formula_of` for a formula that is a kernel, not a function of `torch.library.register_autograd`."""


def overload_of(definition: CustomOpDef) -> OpOverload:
    """Returns the overload of an operator defined with `custom_op`. Relies on `CustomOpDef._opoverload`."""
    return definition._opoverload


def list_custom_ops() -> Iterable[str]:
    """Returns the names of all operators defined with `custom_op`, "mylib::myop". Relies on the registry
    `torch._library.custom_ops.OPDEFS`."""
    return tuple(OPDEFS)


def python_function_of(op: OpOverload) -> Callable[..., Any] | None:
    """Returns the function with which `custom_op` defined an operator, for all devices; None for another operator.

    Relies on `OPDEFS` and on `CustomOpDef._init_fn`.
    """
    definition = OPDEFS.get(family(op))
    return None if definition is None else definition._init_fn


def formula_of(op: OpOverload) -> object | None:
    """Returns an operator's autograd formula: the registered function, `NATIVE`, or None.

    Relies on `OPDEFS`, on `CustomOpDef._backward_fn`, which `register_autograd` sets, and on the dispatch key Autograd.
    """
    definition = OPDEFS.get(family(op))
    if definition is not None:
        return definition._backward_fn  # type: ignore[no-any-return]
    return NATIVE if torch._C._dispatch_has_kernel_for_dispatch_key(full_name(op), "Autograd") else None
