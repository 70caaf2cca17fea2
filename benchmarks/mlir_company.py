"""Calls of 16-bit floats in company: what they take is computed, and so is what is made of it.

XLA may keep the bits that eager rounds away between such ops, so a call that is right alone may be off in a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from benchmarks.mlir_run import Lowering, alone
from benchmarks.op_calls import Call

NARROW = (torch.float16, torch.bfloat16)
FACTORS = (1.1015625, 0.8984375)  # before and behind; both dtypes have them
MULTIPLY = torch.ops.aten.mul.Tensor
SLACK = 1.1


def factors() -> list[torch.Tensor]:
    """What a graph in company takes beside the operands of its calls."""
    return [torch.tensor(factor, dtype=dtype) for dtype in NARROW for factor in FACTORS]


def chained(calls: Sequence[Call]) -> tuple[Graph, list[int]]:
    """The graph of the calls, whose 16-bit operands are products with a number and whose 16-bit results are multiplied."""
    graph, counts = alone(calls)
    operands = [node for node in graph.nodes if node.op == "placeholder"]
    mode = operands[0].meta["val"].fake_mode
    with graph.inserting_after(operands[-1]):
        made = [graph.placeholder(f"factor_{place}") for place in reversed(range(len(factors())))][::-1]
    for node, factor in zip(made, factors(), strict=True):
        node.meta["val"] = mode.from_tensor(factor)
    by_dtype = {dtype: made[place * len(FACTORS) :][: len(FACTORS)] for place, dtype in enumerate(NARROW)}
    with mode:
        with graph.inserting_after(made[-1]):
            for node in (node for node in operands if node.meta["val"].dtype in NARROW):
                users = list(node.users)
                product = _product(graph, node, by_dtype[node.meta["val"].dtype][0])
                for user in users:
                    user.replace_input_with(node, product)
        output = graph.output_node()
        with graph.inserting_before(output):
            results = [
                _product(graph, x, by_dtype[x.meta["val"].dtype][1]) if x.meta["val"].dtype in NARROW else x
                for x in output.args[0]  # type: ignore[union-attr]
            ]
        output.args = (tuple(results),)
    return graph, counts


def eager(call: Call) -> list[torch.Tensor]:
    """What eager makes of a call in company."""
    before, behind = FACTORS
    leaves = [_multiplied(leaf, before) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, call.treespec)
    results = pytree.tree_leaves(call.target(*args, **kwargs))
    return [_multiplied(x, behind) for x in results if isinstance(x, torch.Tensor)]


def _multiplied(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * torch.tensor(factor, dtype=x.dtype) if x.dtype in NARROW else x


def lost_in_company(lowering: Lowering, calls: Sequence[Call]) -> list[str | None]:
    """What says of each call that torch-mlir's results are farther from eager's than the bodies', in company, or None."""
    if not calls:
        return []
    ours, bodies = (lowering.run(calls, by_body=by_body, graph_of=chained, more=factors()) for by_body in (False, True))
    return [_lost(eager(call), our, body) for call, our, body in zip(calls, ours, bodies, strict=True)]


def _lost(wanted: list[torch.Tensor], ours: list[torch.Tensor], bodies: list[torch.Tensor]) -> str | None:
    for want, our, body in zip(wanted, ours, bodies, strict=True):
        if want.dtype in NARROW and (far := _off(our, want)) > SLACK * _off(body, want) + _resolution(want):
            return f"{far:.1e} of the values off eager in company; the JAX body {_off(body, want):.1e}"
    return None


def _off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean distance, as a part of the mean size."""
    finite = want.isfinite() & got.isfinite()
    wide, exact = got[finite].double(), want[finite].double()
    return float((wide - exact).abs().mean() / exact.abs().mean().clamp(min=1e-6)) if finite.any() else 0.0


def _resolution(want: torch.Tensor) -> float:
    """A last digit in one of the values."""
    return torch.finfo(want.dtype).eps / max(1, want.numel())


def _product(graph: Graph, node: Node, factor: Node) -> Node:
    product = graph.call_function(MULTIPLY, (node, factor))
    product.meta["val"] = MULTIPLY(node.meta["val"], factor.meta["val"])
    return product
