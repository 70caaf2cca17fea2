"""What is kept of a graph of AOTAutograd's: all that the same graph is built of in another process, but no executable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.errors import PackageError
from dynaxla.fx.graph_utils import copy_graph, opaque_class_of
from dynaxla.ops.table import OpTable
from dynaxla.options import Options
from dynaxla.partition.partitioner import WarmStart
from dynaxla.passes.manager import CapturedGraph
from dynaxla.torch_api.aot import GraphInputs
from dynaxla.torch_api.fakes import disable_modes
from dynaxla.torch_api.gc_guard import pause_collection
from dynaxla.torch_api.graph_pickling import CannotPickle, dumps, loads
from dynaxla.torch_api.modules import graph_module
from dynaxla.types import GRADIENT_SUM, OWN_BACKWARD, SOURCE, Saved

_META = ("val", OWN_BACKWARD, GRADIENT_SUM, *SOURCE)
"""The keys of nodes' `meta` that are kept; what `SAVED` says is in `SerializedGraph.saved`."""


_UNREADABLE = (
    *(AttributeError, ImportError, TypeError, AssertionError, KeyError, ValueError),
    *(IndexError, EOFError, UnpicklingError),  # of bytes that are not whole
)


@dataclass(frozen=True, slots=True)
class SerializedGraph:
    """A graph as AOTAutograd handed it over, before any pass, and what was decided of it.

    Attributes:
        kind, inputs, static_inputs, saved, gradients: as in `CapturedGraph`.
        module: the graph; its code is not made, since it is never run.
        policies: the buckets of its sizes.
        options: the user's, but for those of debugging, by name.
        function: the user's function, for the log.
    """

    kind: Literal["inference", "forward", "backward"]
    module: GraphModule
    inputs: GraphInputs | None
    static_inputs: frozenset[int]
    saved: Saved
    gradients: tuple[int, ...]
    policies: SymbolPolicies
    options: Mapping[str, Any]
    function: str

    def rebuild(self, table: OpTable) -> CapturedGraph:
        """The graph, for passes to change: not a copy."""
        module = graph_module(self.module, self.module.graph)
        known = self.inputs, self.static_inputs, self.saved, self.gradients
        return CapturedGraph(self.kind, module, table, *known)


def serialize_graph(graph: CapturedGraph, policies: SymbolPolicies, options: Options, function: str) -> bytes:
    """The recipe of a graph that no pass has seen, as bytes.

    Raises:
        CannotPickle: something of it is of this process alone, or an op has an effect: torch, which hands such ops a token to
            order them, hands none to a graph that it loads. The text says what.
    """
    if effects := graph.module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        raise CannotPickle(f"{effects[0].args[1]} has an effect, and torch does not order the effects of loaded graphs")
    if objects := list(dict.fromkeys(filter(None, map(opaque_class_of, graph.module.graph.nodes)))):
        raise CannotPickle(f"it takes an object that is of this process alone: {', '.join(objects)}")
    module = graph_module(graph.module, copy_graph(graph.module.graph))
    module.meta = {}
    kept = (
        graph.kind,
        module,
        graph.inputs,
        graph.static_inputs,
        graph.saved,
        graph.gradients,
        policies,
        stored_options(options),
        function,
    )
    with disable_modes():
        return dumps(kept, _META)


def deserialize_graph(content: bytes) -> SerializedGraph:
    """The recipe that `written` gave.

    Raises:
        PackageError: something in it is not known here: an operator, or a class of the user's.
    """
    with package_errors():
        return SerializedGraph(*loads(content))


@contextmanager
def package_errors() -> Iterator[None]:
    """While it lasts, what was captured is read: with real tensors, and with an error of this package's where it cannot be.

    Raises:
        PackageError: something in it is not known here.
    """
    try:
        with disable_modes(), pause_collection():
            yield
    except _UNREADABLE as error:
        raise PackageError(f"what was captured cannot be read here: {error}", "import what defines it first") from error


def stored_options(options: Options) -> dict[str, Any]:
    """The options that a recipe keeps."""
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name != "debug"}


@dataclass(frozen=True, slots=True)
class SerializedWarmStart:
    """Attributes:
    policies, options, function: as in `SerializedGraph`.
    """

    warm_start: WarmStart
    policies: SymbolPolicies
    options: Mapping[str, Any]
    function: str


def serialize_warm_start(
    warm_start: WarmStart, policies: SymbolPolicies, options: Options, function: str
) -> bytes | None:
    """Such a value as bytes; None where something of it is of this process alone."""
    try:
        with disable_modes():
            return dumps((warm_start, policies, stored_options(options), function), ())
    except CannotPickle:
        return None


def deserialize_warm_start(content: bytes) -> SerializedWarmStart:
    """What `serialize_warm_start` gave.

    Raises:
        PackageError: something in it is not known here.
    """
    with package_errors():
        warm_start, *terms = loads(content)
    if (aliases := warm_start.aliases) is not None:  # its code is not kept
        views = graph_module(aliases.views, aliases.views.graph)
        warm_start = replace(warm_start, aliases=replace(aliases, views=views))
    return SerializedWarmStart(warm_start, *terms)


__all__ = [
    "CannotPickle",
    "SerializedGraph",
    "SerializedWarmStart",
    "deserialize_graph",
    "deserialize_warm_start",
    "package_errors",
    "serialize_graph",
    "serialize_warm_start",
    "stored_options",
]
