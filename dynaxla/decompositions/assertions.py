"""Assertions about values: a compiled part returns the index of the first that fails, and the call raises its error.

Dynamo turns a Python `assert` about a tensor into `_assert_async`. Eager reads the condition at that point of the
program. A compiled part checks all of its assertions at its end, since none of its effects is visible earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument
from torch.types import IntLikeType

from dynaxla.ops.value_bounds import ValueBound, bounds_of
from dynaxla.torch_api.fakes import FakeTensor, mode_of
from dynaxla.torch_api.overloads import OpOverload, parameters

aten = torch.ops.aten
VALUE_CHECK = "values: "
"""What the message of an assertion begins with that a decomposition left, until the pass decomposed_checks keeps it or not."""

_INDEX_ERROR = "IndexError: "  # what the message of an assertion begins with for which eager raises one

_NO_MESSAGE = "Assertion is failed"
_NONE_FAILS = -1

Value = Tensor | IntLikeType | None
"""An input or output of a part."""


class IndexOutOfRange(IndexError, RuntimeError):
    """An index is out of range. For some ops eager's class depends on their mode, too."""


def _assert_async(condition: Tensor) -> None:
    """Calls the overload with a message: torch keeps only that one in graphs."""
    aten._assert_async.msg(condition, "Expected Tensor with single nonzero value, but got zero")


def _functional_assert_async(condition: Tensor, message: str, token: Tensor) -> Tensor:
    aten._assert_async.msg(condition, message)
    return token.clone()


def _assert_tensor_metadata(*given: object, **named: object) -> None:
    """Does nothing: Dynamo checked the fake tensor, and guards the graph on its dtype, device and sizes."""


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


def describe_fault(bound: ValueBound) -> str:
    """The message of an assertion that values lie in a range."""
    return f"{_INDEX_ERROR if bound.error is IndexError else ''}{bound.fault}"


def check_first(op: OpOverload, rewrite: Callable[..., Any]) -> Callable[..., Any]:
    """Puts the assertions of an op's values in front of the decomposition in which the op is lost."""
    find_bounds = bounds_of(str(op))
    if find_bounds is None:
        return rewrite
    names = [parameter.name for parameter in parameters(op)]

    def run(*args: Any, **kwargs: Any) -> Any:
        results = rewrite(*args, **kwargs)
        if results is not NotImplemented:
            for bound in find_bounds({**dict(zip(names, args, strict=False)), **kwargs}):
                aten._assert_async.msg(bound.holds(), VALUE_CHECK + describe_fault(bound))
        return results

    return run


def take_assertions(module: GraphModule, found: Sequence[Node]) -> list[str]:
    """Removes assertions from a graph. Adds a last result: the index of the first assertion that fails, else -1 (int64).

    Args:
        module: a functional graph.
        found: calls of `_assert_async` in it, in order, each on a one-element tensor. Without any, nothing is changed.

    Returns:
        The messages of the assertions.
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


def raise_failed_assertions(
    function: Callable[[Sequence[Value]], list[Value]], messages: Sequence[str]
) -> Callable[[Sequence[Value]], list[Value]]:
    """Wraps a function whose last result is the index of the first assertion that fails: the wrapper raises its error.

    Raises (when called):
        RuntimeError, IndexOutOfRange: an assertion fails.
    """
    if not messages:
        return function

    def run(args: Sequence[Value]) -> list[Value]:
        *results, number = function(args)
        if isinstance(number, FakeTensor):  # compiled for a device elsewhere: nothing was computed
            return results
        failed = int(number)  # type: ignore[arg-type]
        if failed != _NONE_FAILS:
            raise _make_error(messages[failed])
        return results

    return run


def _make_error(message: str) -> Exception:
    text = message.removeprefix(_INDEX_ERROR)
    return RuntimeError(message) if text == message else IndexOutOfRange(text)


def _condition(node: Node) -> Node:
    """Returns the condition of an assertion, a bool of no dims. NaN counts as true, as in eager."""
    condition = node.args[0]
    if _value(node).dtype is not torch.bool:
        condition = _call(node, aten.ne.Scalar, condition, 0)
    return _call(node, aten.view.default, condition, []) if _value(node).dim() else condition  # type: ignore[return-value]


def _value(node: Node) -> Tensor:
    """Returns the fake tensor of an assertion's condition."""
    return node.args[0].meta["val"]  # type: ignore[union-attr, no-any-return]


def _call(node: Node, target: OpOverload, *args: Argument, **kwargs: Argument) -> Node:
    """Adds a call with a fake value, and with the stack trace of the assertion that needs it."""
    made = node.graph.call_function(target, args, kwargs)
    fakes = torch.fx.map_arg(args, lambda n: n.meta["val"])
    with mode_of(_value(node)):
        made.meta = {"val": target(*fakes, **kwargs), "stack_trace": node.stack_trace}
    return made
