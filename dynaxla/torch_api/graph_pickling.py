"""Serializes captured graphs for another process, with symbolic sizes, their ranges and guards.

Relies on `torch.fx._graph_pickler` (GraphPickler, its `_GraphPickleData` and `_UnpickleStateToken`), and on the fields
of `ShapeEnv` listed here; sources and stack traces, which cannot be pickled, are dropped.
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
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc
from torch.fx.graph import CodeGen

_SHAPE_ENV_FIELDS = (
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
_SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class CannotPickle(Exception):
    """A graph references an object that exists only in this process; the text names it."""


def dumps(value: object, meta: Collection[str]) -> bytes:
    """Pickles a value that contains graphs.

    Args:
        value: may contain graphs, fake tensors and symbolic sizes at any depth.
        meta: the keys of the nodes' `meta` to pickle.

    Raises:
        CannotPickle: a part of the value cannot be restored in another process.
    """
    stream = io.BytesIO()
    keys = frozenset(meta)
    try:
        _Pickler(stream, Options(ops_filter=None, node_metadata_key_filter=keys.__contains__)).dump(value)
    except (pickle.PicklingError, NotImplementedError, AssertionError, AttributeError, TypeError) as error:
        raise CannotPickle(f"{type(error).__name__}: {error}") from error
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """Unpickles the result of `dumps`. All of its sizes get one ShapeEnv, and its fake tensors one mode.

    Raises:
        AttributeError: an operator is not defined in this process.
    """
    env = ShapeEnv()
    with env.suppress_guards():  # fake tensors ask for the sizes of their memory, which the capture did not
        return GraphPickler.loads(data, FakeTensorMode(shape_env=env))


class _Pickler(GraphPickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Graph):
            return _make_graph, (_graph_data(obj, self.options), self._unpickle_state)
        if isinstance(obj, ShapeEnv):
            saved_fields = {name: getattr(obj, name) for name in _SHAPE_ENV_FIELDS}
            guards = [(guard.expr, guard.size_oblivious) for guard in obj.guards]
            return _restore_shape_env, (saved_fields, guards, self._unpickle_state)
        if isinstance(obj, _SYMBOLIC_TYPES):
            node = obj.node
            # `node.expr` has the replacements by guards applied: a new SymNode would not apply earlier ones.
            return _make_number, (type(obj), node.expr, node.shape_env, node.pytype, node._hint)
        return super().reducer_override(obj)


def _graph_data(graph: Graph, options: Options) -> _GraphPickleData:
    data = _GraphPickleData(graph, options)
    data.tracer_cls, data.tracer_extras, data._codegen = None, None, CodeGen()
    return data


def _make_graph(data: _GraphPickleData, state: Any) -> Graph:
    return data.unpickle(GraphModule(torch.nn.Module(), Graph()), state)


def _restore_shape_env(saved_fields: dict[str, Any], guards: list[tuple[Any, bool]], state: Any) -> ShapeEnv:
    env: ShapeEnv = state.fake_mode.shape_env
    for name, value in saved_fields.items():
        setattr(env, name, value)
    unknown = SLoc(None, None)
    env.guards = [ShapeGuard(expression, unknown, oblivious) for expression, oblivious in guards]
    # torch writes there where a range is narrowed by a guard, as passes over the graph may do.
    env.var_to_range_sloc = {symbol: ValueRangesSLoc(unknown, unknown) for symbol in env.var_to_range}
    return env


def _make_number(kind: Any, expression: Any, env: ShapeEnv, pytype: type, hint: Any) -> Any:
    return kind(SymNode(expression, env, pytype, hint))
