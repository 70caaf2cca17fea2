"""An op as the calls of torch's own decomposition, in the manner of an aten form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dynaxla.ops.aten_calls import Calls, Form


def decomposed(target: OpOverload) -> Form:
    """The aten form that is torch's own decomposition of an op."""

    def form(call: Calls, *args: Any, **kwargs: Any) -> Any:
        return traced(call, decomposition_table[target], args, kwargs)

    return form


def traced(call: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
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

    with call.mode:
        graph = make_fx(flat)(*[operand.meta["val"] for operand in operands]).graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    results: Any = call.graph.graph_copy(graph, dict(zip(placeholders, operands, strict=True)))
    return tree_unflatten(list(results), structure[0])
