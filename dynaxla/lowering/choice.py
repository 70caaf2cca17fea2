"""Which nodes torch-mlir lowers and which a body: the op table, and what is known to have failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.isolation.failures import Failure, KnownFailures
from dynaxla.lowering.importer import body_call
from dynaxla.ops.table import OpTable, core_table
from dynaxla.torch_api.overloads import OpOverload, parameters


@dataclass(frozen=True, slots=True)
class Choice:
    """Chooses between torch-mlir and a body for every node.

    Attributes:
        failures: what torch-mlir failed on before.
        without_bodies: overloads whose bodies are not used, so that torch-mlir has to take them.
        table: what is known of every op.
        platform: JAX's name of the one to lower for.
    """

    failures: KnownFailures
    without_bodies: frozenset[object] = frozenset()
    table: OpTable = field(default_factory=core_table)
    platform: str = "cpu"

    def has_body(self, node: Node) -> bool:
        """Whether a body exists for the node's op."""
        return node.target in self.table.records and node.target not in self.without_bodies

    def by_body(self, node: Node) -> bool:
        """Whether a body computes the node: where torch-mlir's own lowering is not known to be right."""
        if not self.has_body(node):
            return False
        if unseen(node) is not None or not self._is_right(node):
            return True
        return self._failure(node) is not None

    def _is_right(self, node: Node) -> bool:
        """Whether torch-mlir's lowering is right in the dtypes of a call."""
        operands = [value for n in node.all_input_nodes for value in _tensors(n.meta["val"])]
        results = _tensors(node.meta["val"])
        # The sweep files calls under their operands; of these results it has seen few.
        odd = [value for value in results if value.dtype in _ODD] if operands else results
        dtypes = frozenset(value.dtype for value in (*operands, *odd))
        return self.table.records[node.target].torch_mlir_takes(node, dtypes, self.platform)  # type: ignore[index]

    def lowered(self, graph: Graph) -> Iterator[Node]:
        """The nodes of a static graph that torch-mlir lowers."""
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload) and not self.by_body(node):
                yield node

    def known_failure(self, graph: Graph) -> Failure | None:
        """A failure that is known of a call in the graph for which there is no body."""
        if self.failures.empty:
            return None
        return next((found for node in self.lowered(graph) if (found := self._failure(node)) is not None), None)

    def _failure(self, node: Node) -> Failure | None:
        return None if self.failures.empty else self.failures.get(body_call(node)[0].key)


def unseen(node: Node) -> str | None:
    """Why a call takes the JAX body whatever the sweep has found of its op: what the sweep sees nothing of."""
    operands = [value for n in node.all_input_nodes for value in _tensors(n.meta["val"])]
    if any(value.numel() == 0 for value in (*operands, *_tensors(node.meta["val"]))):
        return "an empty tensor: torch-mlir refuses some, and its passes die of others"
    if any(value.dim() == 0 for value in operands) and _takes_dims(node):
        return "a dim of a tensor that has none: torch-mlir refuses it, or never ends"
    if _repeats_an_operand(node):
        return "an operand twice: torch-mlir folds some ops of x and x as if NaN and infinity were not"
    return None


_ODD = frozenset({torch.uint8, torch.int8, torch.int16, torch.complex64, torch.complex128})


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, torch.Tensor)]


def _takes_dims(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    return any(parameter.name in ("dim", "dims", "dim0") for parameter in parameters(node.target))


def _repeats_an_operand(node: Node) -> bool:
    _, operands = body_call(node)
    return len(operands) > len(set(operands))
