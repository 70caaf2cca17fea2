"""Which nodes torch-mlir lowers and which a JAX rule: the op table, and what is known to have failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.isolation.failures import Failure, KnownFailures
from dynaxla.lowering.importer import rule_call
from dynaxla.ops.table import OpTable, core_table
from dynaxla.torch_api.overloads import OpOverload


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """Chooses between torch-mlir and a JAX rule for every node.

    Attributes:
        failures: what torch-mlir failed on before.
        without_rules: overloads whose JAX rules are not used, so that torch-mlir has to take them.
        table: what is known of every op.
    """

    failures: KnownFailures
    without_rules: frozenset[object] = frozenset()
    table: OpTable = field(default_factory=core_table)

    def has_rule(self, node: Node) -> bool:
        """Whether a JAX rule exists for the node's op."""
        return node.target in self.table.records and node.target not in self.without_rules

    def ruled(self, node: Node) -> bool:
        """Whether the node's body is a JAX rule: where torch-mlir's own lowering is not known to be right."""
        if not self.has_rule(node):
            return False
        values = [value for n in (node, *node.all_input_nodes) for value in _tensors(n.meta["val"])]
        if any(value.numel() == 0 for value in values):
            return True  # the sweep says nothing of empty tensors, on which torch-mlir is weak
        if _repeats_an_operand(node):
            return True  # torch-mlir folds some ops of x and x as if NaN and infinity were not
        operands = [value for n in node.all_input_nodes for value in _tensors(n.meta["val"])] or values
        takes = self.table.torch_mlir_takes(node.target, [value.dtype for value in operands])
        return not takes or _is_odd(values) or self._failure(node) is not None

    def lowered(self, graph: Graph) -> Iterator[Node]:
        """The nodes of a static graph that torch-mlir lowers."""
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload) and not self.ruled(node):
                yield node

    def known_failure(self, graph: Graph) -> Failure | None:
        """A failure that is known of a call in the graph for which there is no rule."""
        if self.failures.empty:
            return None
        return next((found for node in self.lowered(graph) if (found := self._failure(node)) is not None), None)

    def _failure(self, node: Node) -> Failure | None:
        return None if self.failures.empty else self.failures.get(rule_call(node)[0].key)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, torch.Tensor)]


def _is_odd(values: list[torch.Tensor]) -> bool:
    """A dtype that the sweep, which files calls under their first operand's, may not have seen in a result."""
    return any(value.dtype in (torch.uint8, torch.int8, torch.int16) or value.is_complex() for value in values)


def _repeats_an_operand(node: Node) -> bool:
    _, operands = rule_call(node)
    return len(operands) > len(set(operands))
