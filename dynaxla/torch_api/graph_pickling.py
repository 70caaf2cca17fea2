"""Captured graphs as bytes that another process makes the same graphs of: symbolic sizes, their ranges and guards included.

Relies on `torch.fx._graph_pickler` (GraphPickler, its `_GraphPickleData` and `_UnpickleStateToken`), and on the fields of
`ShapeEnv` that are listed here; of sources and stack traces, which do not pickle, nothing is kept.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from typing import Any

import torch
from torch._guards import ShapeGuard, SLoc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx._graph_pickler import GraphPickler, Options, _GraphPickleData
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen

_KEPT_OF_SIZES = (
    "settings",
    "axioms",
    "backed_var_to_val",
    "var_to_range",
    "replacements",
    "divisible",
    "size_like",
    "val_to_var",
    "unbacked_inputs",
    "unbacked_symint_counter",
    "unbacked_symfloat_counter",
)
_KINDS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class CannotPickle(Exception):
    """Something in a graph is of this process alone; the text says what."""


def dumps(value: object, meta: Collection[str]) -> bytes:
    """Pickles a value that holds graphs.

    Args:
        value: it may hold graphs, fake tensors and symbolic sizes at any place.
        meta: which keys of the nodes' `meta` go along.

    Raises:
        CannotPickle: something in it cannot be made in another process.
    """
    stream = io.BytesIO()
    keys = frozenset(meta)
    try:
        _Pickler(stream, Options(ops_filter=None, node_metadata_key_filter=keys.__contains__)).dump(value)
    except (pickle.PicklingError, NotImplementedError, AssertionError, AttributeError, TypeError) as error:
        raise CannotPickle(f"{type(error).__name__}: {error}") from error
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` pickled. All of its sizes have one environment, and its fake tensors one mode.

    Raises:
        AttributeError: an operator is not known in this process.
    """
    return GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))


class _Pickler(GraphPickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Graph):
            return _graph, (_graph_data(obj, self.options), self._unpickle_state)
        if isinstance(obj, ShapeEnv):
            kept = {name: getattr(obj, name) for name in _KEPT_OF_SIZES}
            guards = [(guard.expr, guard.size_oblivious) for guard in obj.guards]
            return _shape_env, (kept, guards, self._unpickle_state)
        if isinstance(obj, _KINDS):
            node = obj.node
            # With what guards have replaced: a number that is made does not ask for what was replaced before it was.
            return _number, (type(obj), node.expr, node.shape_env, node.pytype, node._hint)
        return super().reducer_override(obj)


def _graph_data(graph: Graph, options: Options) -> _GraphPickleData:
    data = _GraphPickleData(graph, options)
    data.tracer_cls, data.tracer_extras, data._codegen = None, None, CodeGen()
    return data


def _graph(data: _GraphPickleData, state: Any) -> Graph:
    return data.unpickle(GraphModule(torch.nn.Module(), Graph()), state)


def _shape_env(kept: dict[str, Any], guards: list[tuple[Any, bool]], state: Any) -> ShapeEnv:
    env: ShapeEnv = state.fake_mode.shape_env
    for name, value in kept.items():
        setattr(env, name, value)
    env.guards = [ShapeGuard(expression, SLoc(None, None), oblivious) for expression, oblivious in guards]
    return env


def _number(kind: Any, expression: Any, env: ShapeEnv, pytype: type, hint: Any) -> Any:
    return kind(SymNode(expression, env, pytype, hint))
