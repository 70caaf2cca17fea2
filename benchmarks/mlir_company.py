"""Calls of 16-bit floats in company: what they take is computed, and so is what is made of it.

XLA may keep the bits that eager rounds away between such ops, so a call that is right alone may be off in a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from benchmarks.mlir_run import Lowering, alone
from benchmarks.op_calls import Call

NARROW = (torch.float16, torch.bfloat16)
FACTOR = 1.1015625  # both dtypes have it
MULTIPLY = torch.ops.aten.mul.Tensor
CONVERT = torch.ops.prims.convert_element_type.default
SLACK = 1.1


def factors() -> list[torch.Tensor]:
    """What a graph in company takes beside the operands of its calls."""
    return [torch.tensor(FACTOR, dtype=dtype) for dtype in NARROW]


def chained(calls: Sequence[Call]) -> tuple[Graph, list[int]]:
    """The graph of the calls, whose 16-bit operands are products with a number and whose 16-bit results become float32."""
    graph, counts = alone(calls)
    operands = [node for node in graph.nodes if node.op == "placeholder"]
    mode = operands[0].meta["val"].fake_mode
    with graph.inserting_after(operands[-1]):
        made = [graph.placeholder(f"factor_{place}") for place in reversed(range(len(NARROW)))][::-1]
    for node, factor in zip(made, factors(), strict=True):
        node.meta["val"] = mode.from_tensor(factor)
    by_dtype = dict(zip(NARROW, made, strict=True))
    with mode:
        with graph.inserting_after(made[-1]):
            for node in [node for node in operands if node.meta["val"].dtype in NARROW]:
                users = list(node.users)
                product = _call(graph, MULTIPLY, node, by_dtype[node.meta["val"].dtype])
                for user in users:
                    user.replace_input_with(node, product)
        output = graph.output_node()
        with graph.inserting_before(output):
            results = tuple(_widened(graph, x) for x in output.args[0])  # type: ignore[union-attr, arg-type]
        output.args = (results,)
    return graph, counts


def eager(call: Call) -> list[torch.Tensor]:
    """What eager makes of a call in company."""
    leaves = [
        leaf * torch.tensor(FACTOR, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in NARROW else leaf
        for leaf in call.leaves
    ]
    args, kwargs = pytree.tree_unflatten(leaves, call.treespec)
    results = [x for x in pytree.tree_leaves(call.target(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    return [x.float() if x.dtype in NARROW else x for x in results]


def lost_in_company(lowering: Lowering, calls: Sequence[Call]) -> list[str | None]:
    """What says of each call that torch-mlir's results are farther from eager's than the bodies', in company, or None."""
    if not calls:
        return []
    ours, bodies = (lowering.run(calls, by_body=by_body, graph_of=chained, more=factors()) for by_body in (False, True))
    return [_lost(eager(call), our, body) for call, our, body in zip(calls, ours, bodies, strict=True)]


def _lost(wanted: list[torch.Tensor], ours: list[torch.Tensor], bodies: list[torch.Tensor]) -> str | None:
    for want, our, body in zip(wanted, ours, bodies, strict=True):
        if want.is_floating_point() and (far := _off(our, want)) > SLACK * _off(body, want) + 1e-6:
            return f"{far:.1e} of the values off eager in company; the JAX body {_off(body, want):.1e}"
    return None


def _off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean distance, as a part of the mean size."""
    finite = want.isfinite() & got.isfinite()
    wide, exact = got[finite].double(), want[finite].double()
    return float((wide - exact).abs().mean() / exact.abs().mean().clamp(min=1e-6)) if finite.any() else 0.0


def _widened(graph: Graph, node: Node) -> Node:
    return _call(graph, CONVERT, node, torch.float32) if node.meta["val"].dtype in NARROW else node


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(x.meta["val"] if isinstance(x, Node) else x for x in args))
    return node
