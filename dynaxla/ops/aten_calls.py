"""An op as other ATen calls, for torch-mlir: what it lowers not at all, or worse as one op than as several.

An aten form is a function that makes the calls. They take the op's place in the graph that is imported, and torch-mlir
lowers all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node, map_arg

from dynaxla.torch_api.decompositions import calls_of, decomposition_of
from dynaxla.torch_api.fakes import mode_of
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.trees import TreeSpec, tree_flatten, tree_unflatten

Form = Callable[..., Any]
"""Called with `Calls` and a call's arguments; gives the node, or the tuple of nodes (None where there is no tensor)."""


class Calls:
    """Appends calls of ATen overloads to a graph, each with the fake tensor that it gives."""

    def __init__(self, graph: Graph, source: Node) -> None:
        self._graph = graph
        self._source = source
        self._mode = mode_of(_tensor(source))

    def __call__(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self._source.meta.items() if key != "val"}
        fakes, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = target(*fakes, **fake_kwargs)
        return node

    def traced(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Appends the calls that a function of tensors makes; gives its results, as nodes."""
        leaves, treespec = tree_flatten((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, Node)]
        structure: list[TreeSpec] = []

        def flat(*tensors: Any) -> list[Any]:
            given = iter(tensors)
            args, kwargs = tree_unflatten([next(given) if isinstance(x, Node) else x for x in leaves], treespec)
            results, spec = tree_flatten(function(*args, **kwargs))
            structure.append(spec)
            return results

        with self._mode:
            traced = calls_of(flat, [operand.meta["val"] for operand in operands])
        placeholders = [node for node in traced.nodes if node.op == "placeholder"]
        values = dict(zip(placeholders, operands, strict=True))
        results: Any = self._graph.graph_copy(traced, values)
        return tree_unflatten(list(results), structure[0])


def decomposed(target: OpOverload) -> Form:
    """The aten form that is torch's own decomposition of an op."""

    def form(call: Calls, *args: Any, **kwargs: Any) -> Any:
        decomposition = decomposition_of(target)
        assert decomposition is not None, "a form of an op that torch decomposes"
        return call.traced(decomposition, args, kwargs)

    return form


def _tensor(node: Node) -> Any:
    value = node.meta["val"]
    return next(v for v in value if v is not None) if isinstance(value, (tuple, list)) else value
