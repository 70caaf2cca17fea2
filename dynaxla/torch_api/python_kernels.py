"""Python kernels of ops. By one for an autograd key torch decomposes an op before any decomposition table is asked.

Relies on `OpOverload.py_kernels`, by dispatch key, and on `OpOverload._dispatch_cache`, which remembers the kernels chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from torch._C import DispatchKey

from dynaxla.torch_api.overloads import OpOverload

Kernel = Callable[..., Any]

AUTOGRAD: Final = DispatchKey.Autograd
COMPOSITE: Final = DispatchKey.CompositeImplicitAutograd
FAKE: Final = DispatchKey.Meta


def python_kernels(op: OpOverload) -> Mapping[DispatchKey, Kernel]:
    """The Python kernels that an op has by now."""
    return dict(op.py_kernels)


def by_torch(op: OpOverload) -> Kernel:
    """An op as autograd has it of torch itself, also where a Python kernel takes its place.

    Relies on `_op_dk`, and on torch having one kernel of it for the autograd of all devices.
    """
    return partial(op._op_dk, AUTOGRAD)


@contextmanager
def changed_kernels(changes: Mapping[OpOverload, Mapping[DispatchKey, Kernel | None]]) -> Iterator[None]:
    """While it lasts, ops have these Python kernels, or for None no such kernel; others stay. What was is put back at the end.

    Dynamo compiles under a lock of its own, so no two of these overlap.
    """
    kept = {op: python_kernels(op) for op in changes}
    for op, kernels in changes.items():
        _give(op, {**kept[op], **kernels})
    try:
        yield
    finally:
        for op, found in kept.items():
            _give(op, found)


def _give(op: OpOverload, kernels: Mapping[DispatchKey, Kernel | None]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update({key: kernel for key, kernel in kernels.items() if kernel is not None})
    op._dispatch_cache.clear()
