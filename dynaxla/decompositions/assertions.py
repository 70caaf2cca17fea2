"""Assertions about values: a compiled part gives the number of the first that fails, and the call raises for it.

Dynamo makes `_assert_async` of a Python `assert` about a tensor. In eager it reads its condition where it stands. A compiled
part checks all of its own at its end: nothing that it does can be seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument
from torch.types import IntLikeType

from dynaxla.torch_api.fakes import mode_of
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten
_NO_MESSAGE = "Assertion is failed"
_NONE_FAILS = -1

Value = Tensor | IntLikeType | None
"""What a part of a graph takes or gives."""


def _assert_async(condition: Tensor) -> None:
    """As the overload with a message: of the two, torch keeps only that in a graph."""
    aten._assert_async.msg(condition, "Expected Tensor with single nonzero value, but got zero")


def _functional_assert_async(condition: Tensor, message: str, token: Tensor) -> Tensor:
    aten._assert_async.msg(condition, message)
    return token.clone()


def _assert_tensor_metadata(*given: object, **named: object) -> None:
    """Dynamo checked it on the fake tensor, whose dtype, device and sizes the graph is guarded for."""


def _is_all_true(truths: Tensor) -> Tensor:
    return torch.all(truths)


def _is_any_true(truths: Tensor) -> Tensor:
    return torch.any(truths)


ASSERTION_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Tensor | None]] = MappingProxyType(
    {
        aten._assert_async.default: _assert_async,
        aten._functional_assert_async.msg: _functional_assert_async,
        aten._assert_tensor_metadata.default: _assert_tensor_metadata,
        aten._is_all_true.default: _is_all_true,
        aten._is_any_true.default: _is_any_true,
    }
)


def take_assertions(module: GraphModule, found: Sequence[Node]) -> list[str]:
    """Takes assertions out of a graph. Its new last result is the number of the first that fails, else -1 (int64).

    Args:
        module: a functional graph.
        found: calls of `_assert_async` in it, in order, each of one number or truth. Where there are none, nothing is changed.

    Returns:
        Their messages.
    """
    if not found:
        return []
    graph = module.graph
    output = graph.output_node()
    with graph.inserting_before(output):
        number = _call(found[0], aten.full.default, [], _NONE_FAILS, dtype=torch.int64, device=_value(found[0]).device)
        for place, node in reversed(list(enumerate(found))):
            number = _call(node, aten.where.ScalarOther, _condition(node), number, place)
    for node in found:
        graph.erase_node(node)
    output.args = ((*output.args[0], number),)  # type: ignore[misc]
    module.recompile()
    return [str(node.args[1]) or _NO_MESSAGE for node in found]


def asserting(
    function: Callable[[Sequence[Value]], list[Value]], messages: Sequence[str]
) -> Callable[[Sequence[Value]], list[Value]]:
    """A function whose last result is the number of the assertion that fails first, made to raise for it.

    Raises (when called):
        RuntimeError: eager's own.
    """
    if not messages:
        return function

    def run(args: Sequence[Value]) -> list[Value]:
        *results, number = function(args)
        failed = int(number)  # type: ignore[arg-type]
        if failed != _NONE_FAILS:
            raise RuntimeError(messages[failed])
        return results

    return run


def _condition(node: Node) -> Node:
    """bool, of no dims: what the node asserts. NaN counts as true, as in eager."""
    condition = node.args[0]
    if _value(node).dtype is not torch.bool:
        condition = _call(node, aten.ne.Scalar, condition, 0)
    return _call(node, aten.view.default, condition, []) if _value(node).dim() else condition  # type: ignore[return-value]


def _value(node: Node) -> Tensor:
    """The fake tensor that a node asserts."""
    return node.args[0].meta["val"]  # type: ignore[union-attr, no-any-return]


def _call(node: Node, target: OpOverload, *args: Argument, **kwargs: Argument) -> Node:
    """A new call, with a fake value and the stack trace of the assertion that it is made for."""
    made = node.graph.call_function(target, args, kwargs)
    fakes = torch.fx.map_arg(args, lambda n: n.meta["val"])
    with mode_of(_value(node)):
        made.meta = {"val": target(*fakes, **kwargs), "stack_trace": node.stack_trace}
    return made
