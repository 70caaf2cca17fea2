"""Fake tensors: their modes, storages and views; and torch's global records of captures."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import is_opaque_value
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx import Node
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["FakeTensor", "FakeTensorMode"]  # types without a public name in torch


def make_uncached_mode() -> FakeTensorMode:
    """Makes a fake mode without a cache: torch's global cache keeps results for every size for the life of the process.

    Relies on `FakeTensorMode.cache_enabled`.
    """
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


def make_symbolic_mode(sizes: Sequence[int]) -> tuple[FakeTensorMode, list[torch.SymInt]]:
    """Makes a fake mode without a cache, and independent symbolic sizes in it. `sizes` are their examples, 2 or more each.

    Relies on `ShapeEnv.create_symbol` and `create_symintnode`, as torch's captures do, and on
    `FakeTensorMode.cache_enabled`.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    mode.cache_enabled = False
    made: list[Any] = []
    for number, size in enumerate(sizes):
        source = ConstantSource(f"size_{number}")
        symbol = env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
        made.append(env.create_symintnode(symbol, hint=size, source=source))
    return mode, made


def make_fake(
    mode: FakeTensorMode, dtype: torch.dtype, sizes: Sequence[Any], strides: Sequence[Any] | None = None
) -> torch.Tensor:
    """Makes a fake tensor of the CPU in a mode, row-major unless it has strides, in an eighth of the time of `torch.empty`.

    Relies on `in_kernel_invocation_manager` and on the arguments of `FakeTensor`.
    """
    with in_kernel_invocation_manager(mode):
        if strides is None:
            meta = torch.empty(sizes, dtype=dtype, device="meta")
        else:
            meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cpu"))


def disable_modes() -> AbstractContextManager[Any]:
    """Context in which tensors are real, although a graph is being captured. Relies on `_disable_current_modes`."""
    return _disable_current_modes()  # type: ignore[no-any-return]


def mode_of(fake: torch.Tensor) -> FakeTensorMode:
    """Returns the mode of a fake tensor: an op cannot take values of two modes. Relies on `FakeTensor.fake_mode`."""
    return fake.fake_mode  # type: ignore[attr-defined, no-any-return]


def is_given_fake(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor was given to a compiled function, and does not stand for a real one: within a capture those have
    the capture's mode, as where torch splits a graph for DistributedDataParallel and captures the pieces.

    Relies on `TracingContext.fake_mode`.
    """
    context = TracingContext.try_get()
    return isinstance(tensor, FakeTensor) and (context is None or tensor.fake_mode is not context.fake_mode)


def captured_value(node: Node) -> Any:
    """Returns the fake value of a node of a graph as captured by Dynamo, or None. Relies on `meta["example_value"]`."""
    return node.meta.get("example_value")


def memory_of(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage; fake tensors share storages as eager's tensors do. Relies on
    `UntypedStorage._cdata`."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def find_opaque_class(value: object) -> str | None:
    """Returns the class of an object that graphs hand on without computing with it, such as a device mesh, a process
    group or an object of a TorchScript class; None for a tensor, a number or anything else.

    Relies on `FakeScriptObject.script_class_name`, and on `is_opaque_value` for a real object; and on `BackwardState`, which
    holds the hooks that a backward calls, with torch's compiled autograd.
    """
    if isinstance(value, FakeScriptObject):
        return value.script_class_name.rpartition(".")[2]  # type: ignore[no-any-return]
    is_object = isinstance(value, (torch.ScriptObject, BackwardState)) or is_opaque_value(value)
    return type(value).__name__ if is_object else None


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd records a tensor as a view of another. Relies on `Tensor._is_view`."""
    return tensor._is_view()


def get_view_base(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the base of a view, as recorded by autograd; the tensor itself if it is no view. Relies on `Tensor._base`."""
    return tensor if tensor._base is None else tensor._base


def is_erased(node: Node) -> bool:
    """Whether a node was erased from its graph. Relies on `Node._erased`."""
    return node._erased  # type: ignore[no-any-return]


@contextmanager
def drop_graph_sources() -> Iterator[None]:
    """Context at whose end torch drops the sources of graph modules created within it; else torch keeps every source for ever.

    Relies on `torch.fx.graph_module._loader`, which keeps sources by name in order of creation, and on `linecache`, to
    which it adds them.
    """
    sources = torch.fx.graph_module._loader.eval_cache
    before = len(sources)
    try:
        yield
    finally:
        for name in list(sources)[before:]:
            sources.pop(name, None)
            linecache.cache.pop(name, None)
