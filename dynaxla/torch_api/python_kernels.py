"""Python kernels of ops. With one for an autograd key torch decomposes an op before it consults a decomposition table.

Relies on `py_kernels` of overloads and of higher-order operators, by dispatch key, and on their `_dispatch_cache`, which caches
the chosen kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from torch._C import DispatchKey

from dynaxla.torch_api.overloads import HigherOrderOperator, OpOverload

Kernel = Callable[..., Any]

AUTOGRAD: Final = DispatchKey.Autograd
COMPOSITE: Final = DispatchKey.CompositeImplicitAutograd
FAKE: Final = DispatchKey.Meta


def python_kernels(op: OpOverload | HigherOrderOperator) -> Mapping[DispatchKey, Kernel]:
    """Returns the Python kernels that an op currently has."""
    return dict(op.py_kernels)


def make_autograd_kernel(op: OpOverload) -> Kernel:
    """Returns torch's own autograd kernel of an op, even if a Python kernel overrides it.

    Relies on `_op_dk`, and on torch having one autograd kernel of the op for all devices.
    """
    return partial(op._op_dk, AUTOGRAD)


def make_composite_kernel(op: OpOverload) -> Kernel:
    """Returns torch's own kernel that makes an op of others, even if a Python kernel overrides it.

    Relies on `_op_dk`.
    """
    return partial(op._op_dk, COMPOSITE)


@contextmanager
def replace_python_kernels(
    changes: Mapping[OpOverload | HigherOrderOperator, Mapping[DispatchKey, Kernel | None]],
) -> Iterator[None]:
    """Context that replaces Python kernels of ops, or removes those given as None; restores all at its end.

    Dynamo compiles under a lock of its own, so no two of these contexts overlap.
    """
    previous = {op: python_kernels(op) for op in changes}
    for op, kernels in changes.items():
        _set_kernels(op, {**previous[op], **kernels})
    try:
        yield
    finally:
        for op, found in previous.items():
            _set_kernels(op, found)


def _set_kernels(op: OpOverload | HigherOrderOperator, kernels: Mapping[DispatchKey, Kernel | None]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update({key: kernel for key, kernel in kernels.items() if kernel is not None})
    op._dispatch_cache.clear()
