"""Aten forms: ops as other ATen calls, for ops that torch-mlir does not lower, or lowers better as several ops.

An aten form is a function that makes the calls. They replace the op in the graph that is imported, and torch-mlir lowers
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node, map_arg

from dynaxla.torch_api.decompositions import decomposition_calls
from dynaxla.torch_api.fakes import mode_of
from dynaxla.torch_api.meta_kernels import run_meta_kernel
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.pytree import tree_leaves

Form = Callable[..., Any]
"""A function of `AtenCallBuilder` and a call's arguments. Returns the node, or a tuple of nodes (None for a result
without a tensor)."""


class AtenCallBuilder:
    """Appends calls of ATen overloads, with their fake results, to a graph.

    Attributes:
        graph: the graph.
        mode: the fake tensors' mode.
    """

    def __init__(self, graph: Graph, source: Node) -> None:
        self.graph = graph
        self.mode = mode_of(_tensor(source))
        self._source = source

    def __call__(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self._source.meta.items() if key != "val"}
        fakes, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = run_meta_kernel(self.mode, target, fakes, fake_kwargs)
        return node

    def decomposed(self, args: Any, kwargs: Any) -> list[Any]:
        """Appends the calls of torch's decomposition of the source's op and returns the results."""
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Node)]
        fakes, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            graph = decomposition_calls(self._source.target, fakes, fake_kwargs)  # type: ignore[arg-type]
        placeholders = graph.find_nodes(op="placeholder")
        results: Any = self.graph.graph_copy(graph, dict(zip(placeholders, operands, strict=True)))
        return list(results)


def decompose(call: AtenCallBuilder, *args: Any, **kwargs: Any) -> list[Node]:
    """The aten form of ops that torch-mlir lowers through torch's decomposition."""
    return call.decomposed(args, kwargs)


def _tensor(node: Node) -> Any:
    value = node.meta["val"]
    return next(v for v in value if v is not None) if isinstance(value, (tuple, list)) else value
