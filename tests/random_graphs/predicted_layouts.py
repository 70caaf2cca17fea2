"""The layouts that torch's own capture predicts for the values of a random program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.compiler import set_stance
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from dynaxla.decompositions.decomposition_table import decomposition_table
from tests.random_graphs.random_programs import Program, make_inputs


def predicted_layouts(program: Program) -> list[Tensor]:
    """Fake tensors of every value that capture makes."""
    found: list[Tensor] = []

    def keep(module: GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        values = [value for node in module.graph.nodes for value in tree_leaves(node.meta.get("val"))]
        found.extend(value for value in values if isinstance(value, Tensor))
        return module.forward

    torch._dynamo.reset()
    capture = aot_autograd(fw_compiler=keep, decompositions=dict(decomposition_table()))
    with set_stance("default"):
        torch.compile(program.function(), backend=capture, fullgraph=True)(*make_inputs(program.inputs))
    return found
