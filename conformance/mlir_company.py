"""Checks calls of 16-bit floats inside a program whose results are converted to float32.

Between an op of 16-bit floats and a conversion, XLA may keep bits that eager rounds away. So a call that is right alone
may be wrong in a larger program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from conformance.mlir_run import Lowering, alone
from conformance.op_calls import Call

NARROW = (torch.float16, torch.bfloat16)
CONVERT = torch.ops.prims.convert_element_type.default
SLACK = 1.1


def widened(calls: Sequence[Call]) -> tuple[Graph, list[int]]:
    """The graph of the calls, whose 16-bit results become float32."""
    graph, counts = alone(calls)
    output = graph.output_node()
    with graph.inserting_before(output):
        results = tuple(_widened(graph, x) for x in output.args[0])  # type: ignore[union-attr, arg-type]
    output.args = (results,)
    return graph, counts


def _widened(graph: Graph, node: Node) -> Node:
    if node.meta["val"].dtype not in NARROW:
        return node
    wide = graph.call_function(CONVERT, (node, torch.float32))
    with node.meta["val"].fake_mode:
        wide.meta["val"] = node.meta["val"].float()
    return wide


def lost_in_company(lowering: Lowering, calls: Sequence[Call]) -> list[str | None]:
    """What says of each call that torch-mlir's results are farther from eager's than the body's, in company, or None."""
    if not calls:
        return []
    ours, bodies = (lowering.run(calls, by_body=by_body, graph_of=widened) for by_body in (False, True))
    return [_lost(call, our, body) for call, our, body in zip(calls, ours, bodies, strict=True)]


def _lost(call: Call, ours: list[torch.Tensor], bodies: list[torch.Tensor]) -> str | None:
    results = [x for x in pytree.tree_leaves(call.run()) if isinstance(x, torch.Tensor)]
    for want, our, body in zip(results, ours, bodies, strict=True):
        if want.dtype in NARROW and (far := _off(our, want)) > SLACK * _off(body, want) + 1e-6:
            return f"{far:.1e} of the values off eager in company; the JAX body {_off(body, want):.1e}"
    return None


def _off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean distance, as a part of the mean size."""
    finite = want.isfinite() & got.isfinite()
    wide, exact = got[finite].double(), want[finite].double()
    return float((wide - exact).abs().mean() / exact.abs().mean().clamp(min=1e-6)) if finite.any() else 0.0
