"""Which nodes torch-mlir lowers and which a JAX rule: the op table, and what is known to have failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from dynaxla.lowering.failures import Failure, KnownFailures
from dynaxla.lowering.importer import rule_call
from dynaxla.ops.registry import rule_targets, torch_mlir_takes


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """Chooses between torch-mlir and a JAX rule for every node.

    Attributes:
        failures: what torch-mlir failed on before.
        without_rules: overloads whose JAX rules are not used, so that torch-mlir has to take them.
    """

    failures: KnownFailures
    without_rules: frozenset[object] = frozenset()

    def has_rule(self, node: Node) -> bool:
        """Whether a JAX rule exists for the node's op."""
        return node.target in rule_targets() and node.target not in self.without_rules

    def ruled(self, node: Node) -> bool:
        """Whether the node's body is a JAX rule: where torch-mlir's own lowering is not known to be right."""
        if not self.has_rule(node):
            return False
        values = [n.meta["val"] for n in node.all_input_nodes] or [node.meta["val"]]
        dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor)]
        return not torch_mlir_takes(node.target, dtypes) or self._failure(node) is not None

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
