"""Fake tensors: the values of a graph while it is captured, without elements; and what torch keeps of captures."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["FakeTensor", "FakeTensorMode"]  # types, which torch has under no public name


def passing_mode() -> FakeTensorMode:
    """A mode of which nothing stays: torch keeps what ops gave of fake tensors, for every size, as long as the process lives.

    Relies on `FakeTensorMode.cache_enabled`.
    """
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


def sized_mode(sizes: Sequence[int]) -> tuple[FakeTensorMode, list[torch.SymInt]]:
    """A mode of which nothing stays, and sizes that vary in it, each by itself, of which these are examples, 2 or more.

    Relies on `ShapeEnv.create_symbol` and `create_symintnode`, as torch's captures do, and on `FakeTensorMode.cache_enabled`.
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


def outside_of_modes() -> AbstractContextManager[Any]:
    """While it lasts, tensors are real ones, though a graph is being captured. Relies on `_disable_current_modes`."""
    return _disable_current_modes()  # type: ignore[no-any-return]


def mode_of(fake: torch.Tensor) -> FakeTensorMode:
    """The mode that a fake tensor lives in: values of two modes cannot meet. Relies on `FakeTensor.fake_mode`."""
    return fake.fake_mode  # type: ignore[attr-defined, no-any-return]


def captured_value(node: Node) -> Any:
    """The fake value of a node of a graph as Dynamo captured it, or None. Relies on `meta["example_value"]`."""
    return node.meta.get("example_value")


def memory_of(tensor: torch.Tensor) -> int:
    """Names the memory that a tensor lies in; fake tensors share it as those of eager do. Relies on `UntypedStorage._cdata`."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another. Relies on `Tensor._is_view`."""
    return tensor._is_view()


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd knows a view to be of; the tensor itself if it is no view. Relies on `Tensor._base`."""
    return tensor if tensor._base is None else tensor._base


def is_erased(node: Node) -> bool:
    """Whether a node was taken out of its graph. Relies on `Node._erased`."""
    return node._erased  # type: ignore[no-any-return]


@contextmanager
def sources_forgotten() -> Iterator[None]:
    """torch keeps the source of every graph module that there ever was: those that are written within it go where it ends.

    Relies on `torch.fx.graph_module._loader`, which keeps them by names in the order in which they came, and on `linecache`,
    to which it tells them.
    """
    sources = torch.fx.graph_module._loader.eval_cache
    before = len(sources)
    try:
        yield
    finally:
        for name in list(sources)[before:]:
            sources.pop(name, None)
            linecache.cache.pop(name, None)
