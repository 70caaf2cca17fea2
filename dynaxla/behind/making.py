"""A part at one place, its bucket or its exact sizes, compiled: here, or in the child that works behind the calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Graph

from dynaxla.bucketing.sizing import Buckets
from dynaxla.observe.spent import Spent
from dynaxla.programs import Made, PartGraphs
from dynaxla.runtime.client import Executable
from dynaxla.stages import StaticGraph
from dynaxla.torch_api.fakes import FakeTensorMode


class Compiles(Protocol):
    """A pipeline, as far as it is needed here."""

    @property
    def tracing(self) -> threading.RLock: ...

    def compile(self, graph: Graph, spent: Spent, *, fold: bool = False) -> Executable: ...


@dataclass(frozen=True, slots=True)
class Argument:
    """What an exact shape depends on of a tensor that a call gives.

    Attributes:
        shape, strides: in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any) -> Any:
        """What stands for an argument of a call: such a description, or a plain number itself."""
        if not isinstance(value, torch.Tensor):
            return value
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)


def stand_ins(arguments: Sequence[Any]) -> list[Any]:
    """Arguments like those described, without memory."""
    with FakeTensorMode():
        return [
            torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device=each.device)
            if isinstance(each, Argument)
            else each
            for each in arguments
        ]


@dataclass(frozen=True, slots=True)
class AtBucket:
    """A bucket.

    Attributes:
        order: of the symbols in a call's values.
    """

    buckets: Buckets
    order: tuple[sympy.Symbol, ...]


@dataclass(frozen=True, slots=True)
class AtSizes:
    """Exact sizes: the arguments of a call, or descriptions of them."""

    arguments: Sequence[Any]


Place = AtBucket | AtSizes


def make(graphs: PartGraphs, pipeline: Compiles, place: Place, spent: Spent) -> Made:
    """The part at a place, compiled.

    Raises:
        CannotPad: padding could change a result.
        LoweringError, LinkError, CompileError: see `Pipeline.compile`.
    """
    if isinstance(place, AtSizes):
        with pipeline.tracing:
            static = graphs.specialize(place.arguments)
        return Made(_compiled(static, pipeline, spent), static.argument_orders, static.outputs)
    started = time.perf_counter()
    try:
        with pipeline.tracing:
            static, shapes, cropping = graphs.pad(place.buckets, place.order)
    finally:
        spent.padding_s += time.perf_counter() - started
    return Made(_compiled(static, pipeline, spent), static.argument_orders, static.outputs, shapes, cropping)


def make_fold(graphs: PartGraphs, pipeline: Compiles, spent: Spent) -> Executable:
    """The program of what a part's weights alone determine; the part has such work.

    Raises:
        LoweringError, LinkError, CompileError: see `Pipeline.compile`.
    """
    with pipeline.tracing:
        graph = graphs.specialize_fold()
    assert graph is not None
    return pipeline.compile(graph, spent, fold=True)


def _compiled(static: StaticGraph, pipeline: Compiles, spent: Spent) -> Executable | None:
    """None where every output is an argument or a plain value."""
    if all(source.result is None for source in static.outputs):
        return None
    return pipeline.compile(static.graph, spent)
