"""What eager raises because of a value, a compiled graph raises too: an index out of range, a whole number divided by zero.

A program cannot raise. A check becomes an assertion (decompositions/assertions.py): the program says which one failed, and the
call raises before it returns. That waits for the program, so checks are made by default on the CPU alone, whose results
are waited for anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.types import IntLikeType

from dynaxla.custom_ops.schema import arguments_of
from dynaxla.decompositions.assertions import OUT_OF_RANGE
from dynaxla.diagnostics import user_frame
from dynaxla.fx.edit import call_before
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.targets.cpu import CPU
from dynaxla.torch_api.overloads import OpOverload, base_name

aten = torch.ops.aten
Number = int | Node
_INDICES = (torch.int64, torch.int32)


def _value(number: Number) -> IntLikeType:
    return number if isinstance(number, int) else number.meta["val"]  # type: ignore[no-any-return]


def _is_tensor(argument: object) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta["val"], torch.Tensor)


@dataclass(frozen=True, slots=True)
class _Requirement:
    """What eager requires of a call's values.

    Attributes:
        holds: a bool of no dims.
        fault: what is wrong where it does not hold.
    """

    holds: Node
    fault: str


class _Call:
    """A call whose values are checked: the nodes of its arguments, by name, and what is computed of them in front of it."""

    def __init__(self, node: Node, made: dict[tuple[Any, ...], Node]) -> None:
        self.node = node
        self.given: Mapping[str, Any] = arguments_of(node)
        self._made = made

    def compute(self, target: OpOverload, *args: Any) -> Node:
        """The result of an op; that of an earlier check, if it computed the same."""
        key = (target, *args)
        if key not in self._made:
            self._made[key] = call_before(self.node.graph, self.node, target, args)
        return self._made[key]

    def size(self, tensor: Node, dim: int) -> Number:
        """A tensor's size; 1 where it has no dims."""
        value = tensor.meta["val"]
        size = value.shape[dim] if value.dim() else 1
        if isinstance(size, int):
            return size
        return self._number(aten.sym_size.int, size, tensor, dim % value.dim())

    def count(self, tensor: Node) -> Number:
        """How many elements a tensor has."""
        count: Number = 1
        for dim in range(tensor.meta["val"].dim()):
            size = self.size(tensor, dim)
            if isinstance(count, int) and isinstance(size, int):
                count *= size
            else:
                count = self._number(operator.mul, _value(count) * _value(size), count, size)
        return count

    def negate(self, number: Number) -> Number:
        return -number if isinstance(number, int) else self._number(operator.neg, -_value(number), number)

    def _number(self, target: Any, value: Any, *args: Any) -> Node:
        key = (target, *args)
        if key not in self._made:
            with self.node.graph.inserting_before(self.node):
                self._made[key] = self.node.graph.call_function(target, args)
            self._made[key].meta["val"] = value
        return self._made[key]

    def all_within(self, values: Node, lowest: Number, end: Number, ignored: int | None = None) -> Node:
        """Whether all values are from `lowest` to below `end`, or the ignored one."""
        above, below = self.compute(aten.ge.Scalar, values, lowest), self.compute(aten.lt.Scalar, values, end)
        within = self.compute(aten.logical_and.default, above, below)
        if ignored is not None:
            within = self.compute(aten.logical_or.default, within, self.compute(aten.eq.Scalar, values, ignored))
        return self.compute(aten.all.default, within)


Check = Callable[[_Call], Iterator[_Requirement]]


def _along_dim(call: _Call, *, wraps: bool = False) -> Iterator[_Requirement]:
    dim = call.given["dim"]
    size = call.size(call.given["self"], dim)
    holds = call.all_within(call.given["index"], call.negate(size) if wraps else 0, size)
    yield _Requirement(holds, f"{OUT_OF_RANGE}an index of dimension {dim} is out of range")


def _of_dims(call: _Call) -> Iterator[_Requirement]:
    tensor = call.given["self"]
    for dim, index in enumerate(call.given["indices"]):
        if index is not None and index.meta["val"].dtype in _INDICES:
            size = call.size(tensor, dim)
            holds = call.all_within(index, call.negate(size), size)
            yield _Requirement(holds, f"{OUT_OF_RANGE}an index of dimension {dim} is out of range")


def _of_rows(call: _Call) -> Iterator[_Requirement]:
    holds = call.all_within(call.given["indices"], 0, call.size(call.given["weight"], 0))
    yield _Requirement(holds, f"{OUT_OF_RANGE}an index is out of range")


def _of_bags(call: _Call) -> Iterator[_Requirement]:
    yield from _of_rows(call)
    first = call.compute(aten.slice.Tensor, call.given["offsets"], 0, 0, 1)
    holds = call.compute(aten.all.default, call.compute(aten.eq.Scalar, first, 0))
    yield _Requirement(holds, "the first bag does not begin at 0")


def _of_elements(call: _Call) -> Iterator[_Requirement]:
    count = call.count(call.given["self"])
    holds = call.all_within(call.given["index"], call.negate(count), count)
    yield _Requirement(holds, f"{OUT_OF_RANGE}an index is out of range")


def _of_classes(call: _Call) -> Iterator[_Requirement]:
    logits = call.given["self"]
    classes = call.size(logits, min(1, logits.meta["val"].dim() - 1))
    holds = call.all_within(call.given["target"], 0, classes, call.given.get("ignore_index"))
    yield _Requirement(holds, f"{OUT_OF_RANGE}a target is out of bounds")


def _of_labels(call: _Call) -> Iterator[_Requirement]:
    holds = call.all_within(call.given["target"], -1, call.size(call.given["self"], -1))
    yield _Requirement(holds, f"{OUT_OF_RANGE}a target is out of bounds")


def _of_probabilities(call: _Call) -> Iterator[_Requirement]:
    for name, what in (("self", "input"), ("target", "target")):
        values = call.given[name]
        within = call.compute(
            aten.logical_and.default, call.compute(aten.ge.Scalar, values, 0), call.compute(aten.le.Scalar, values, 1)
        )
        yield _Requirement(call.compute(aten.all.default, within), f"all elements of {what} should be between 0 and 1")


def _of_divisors(call: _Call) -> Iterator[_Requirement]:
    """Whole numbers by zero; a plain number is looked at when it is captured."""
    other, value = call.given["other"], call.node.meta["val"]
    is_whole = not (value.is_floating_point() or value.is_complex())
    if _is_tensor(other) and is_whole and call.given.get("rounding_mode", "floor") is not None:
        holds = call.compute(aten.all.default, call.compute(aten.ne.Scalar, other, 0))
        yield _Requirement(holds, "ZeroDivisionError: a whole number is divided by zero")


def _of_sources(call: _Call) -> Iterator[_Requirement]:
    """A mask takes as many elements as it has true values; one that is broadcast is not looked at."""
    mask, count = call.given["mask"], call.count(call.given["source"])
    if str(mask.meta["val"].shape) == str(call.node.meta["val"].shape):
        holds = call.compute(aten.le.Scalar, call.compute(aten.sum.default, mask), count)
        yield _Requirement(holds, "the mask has more true values than the source has elements")


_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_reduce"), _along_dim),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _along_dim),
    "index_fill": partial(_along_dim, wraps=True),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _of_dims),
    **dict.fromkeys(("take", "put"), _of_elements),
    "embedding": _of_rows,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _of_bags),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _of_classes),
    "multilabel_margin_loss_forward": _of_labels,
    "binary_cross_entropy": _of_probabilities,
    **dict.fromkeys(("floor_divide", "remainder", "fmod", "div"), _of_divisors),
    "masked_scatter": _of_sources,
}
"""By the name of an op."""


def check_values(graph: Graph) -> None:
    """Puts the assertions in front of the calls; values that several calls read alike are checked once."""
    asserted: set[Node] = set()
    made: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            continue
        check = _CHECKS.get(base_name(node.target))
        for required in check(_Call(node, made)) if check is not None else ():
            if required.holds not in asserted:
                asserted.add(required.holds)
                _assert(node, required)


def _assert(node: Node, required: _Requirement) -> None:
    frame, graph = user_frame(node), node.graph
    place = f" at {frame}" if frame else ""
    message = f"{required.fault} (aten.{node.target.__name__}{place})"  # type: ignore[union-attr]
    with graph.inserting_before(node):
        assertion = graph.call_function(aten._assert_async.msg, (required.holds, message))
    assertion.meta = {**required.holds.meta, "val": None}


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    wanted = context.options.value_checks
    if wanted is None:
        wanted = context.device.type == "cpu" and context.target is CPU
    if wanted and graph.kind != "backward":  # what a backward reads, its forward has checked
        check_values(graph.module.graph)
    return graph


PASS = Pass(
    "value_checks",
    _run,
    "on the CPU, calls whose values eager may refuse (indices, targets, divisors) have an assertion in front",
)
