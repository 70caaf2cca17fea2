"""Chooses who lowers a node, torch-mlir or a JAX body, by the op table and by recorded failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.isolation.failures import CompilerFailure, KnownFailures
from dynaxla.lowering.call_graph import op_call
from dynaxla.ops.dtypes import FLOAT8, INTEGERS_WITHOUT_BOOL
from dynaxla.ops.table import OpTable, core_table
from dynaxla.torch_api.overloads import OpOverload, parameters


@dataclass(frozen=True, slots=True)
class LoweringChoice:
    """Chooses between torch-mlir and a JAX body for every node.

    Attributes:
        failures: the calls on which torch-mlir failed before.
        without_bodies: overloads whose bodies are disabled, so that torch-mlir has to lower them.
        table: the op table.
        platform: the platform to lower for, by JAX's name.
    """

    failures: KnownFailures
    without_bodies: frozenset[object] = frozenset()
    table: OpTable = field(default_factory=core_table)
    platform: str = "cpu"

    def has_body(self, node: Node) -> bool:
        """Whether the node's op has a JAX body."""
        return node.target in self.table.records and node.target not in self.without_bodies

    def offers(self, node: Node) -> bool:
        """Whether torch-mlir should lower a call: its lowering is known to be right, or the op has no body, and it
        has not failed on
        this call before."""
        if self.has_body(node) and (reason_for_jax(node) is not None or not self._is_right(node)):
            return False
        return self.failure(node) is None

    def _is_right(self, node: Node) -> bool:
        """Whether torch-mlir's lowering is known to be right in the dtypes of a call."""
        operands = [value for n in node.all_input_nodes for value in _tensors(n.meta["val"])]
        results = _tensors(node.meta["val"])
        # The sweep files calls under their operands; of these results it has seen few. A sum of integers as float16 would
        # be added in float16.
        odd = [value for value in results if value.dtype in _ODD] if operands else results
        dtypes = frozenset(value.dtype for value in (*operands, *odd))
        return self.table.records[node.target].torch_mlir_takes(node, dtypes, self.platform)  # type: ignore[index]

    def list_failed(self, graph: Graph) -> Iterator[tuple[Node, CompilerFailure]]:
        """The nodes of a static graph without a body on which torch-mlir is known to fail."""
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload) and not self.has_body(node):
                failure = self.failure(node)
                if failure is not None:
                    yield node, failure

    def failure(self, node: Node) -> CompilerFailure | None:
        """The recorded failure of torch-mlir on a call, or None."""
        return None if self.failures.empty else self.failures.get(op_call(node)[0].key)


def reason_for_jax(node: Node) -> str | None:
    """Why a call must be lowered by its JAX body whatever verdict the op has, for properties that the sweep does not
    cover; empty if
    nothing forbids torch-mlir."""
    operands = [value for n in node.all_input_nodes for value in _tensors(n.meta["val"])]
    if any(value.numel() == 0 for value in (*operands, *_tensors(node.meta["val"]))):
        return "an empty tensor: torch-mlir refuses some, and its passes die of others"
    made = {value.dtype for value in _tensors(node.meta["val"])}
    if any(value.is_floating_point() for value in operands) and made & _integers(node):
        return "floats that become integers: torch-mlir gives the nearest, torch what is left of the whole number, or the least"
    if len({value.dtype for value in operands if value.is_floating_point()}) > 1:
        return "floats of several dtypes: torch-mlir takes some steps in one of them, torch all in that of the result"
    numbers = [value for value in operands if value.dtype is not torch.bool]
    if len({value.dtype for value in numbers}) > 1 and len({value.dim() == 0 for value in numbers}) > 1:
        return "a tensor of no dims of another dtype: torch-mlir compares in its dtype, torch in that of the tensor with dims"
    if any(value.dim() == 0 for value in operands) and _takes_dims(node):
        return "a dim of a tensor that has none: torch-mlir refuses it, or never ends"
    return None


_NARROW = INTEGERS_WITHOUT_BOOL - {torch.int64}


def _integers(call: Node) -> frozenset[torch.dtype]:
    """The dtypes of results that are converted from the operands: without a conversion int64 is that of places."""
    assert isinstance(call.target, OpOverload)
    given = {
        parameter.name: value for parameter, value in zip(parameters(call.target), call.args, strict=False)
    } | call.kwargs
    converts = given.get("dtype") is not None or call.target is torch.ops.aten.copy.default
    return INTEGERS_WITHOUT_BOOL if converts else _NARROW


_ODD = FLOAT8 | {torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, torch.Tensor)]


def _takes_dims(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    return any(parameter.name in ("dim", "dims", "dim0") for parameter in parameters(node.target))
