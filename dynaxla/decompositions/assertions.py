"""Assertions about values: a compiled part returns the index of the first that fails, and the call raises its error.

Dynamo turns a Python `assert` about a tensor into `_assert_async`. `torch.linalg` follows factorizations by
`_linalg_check_errors`, which raises for matrices that have none. Eager reads the values at that point of the program. A
compiled part checks all of its assertions at its end, since none of its effects is visible earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument
from torch.types import IntLikeType

from dynaxla.ops.value_bounds import ValueBound, bounds_of
from dynaxla.torch_api.fakes import FakeTensor, mode_of
from dynaxla.torch_api.overloads import OpOverload, parameters
from dynaxla.torch_api.python_kernels import AUTOGRAD, make_autograd_kernel, replace_python_kernels
from dynaxla.torch_api.tracing import call_without_token, is_functionalized

aten = torch.ops.aten
CHECK_FACTORIZATION = aten._linalg_check_errors.default
ASSERTIONS = (aten._assert_async.msg, CHECK_FACTORIZATION)
"""The ops of a graph that raise for some values, and return nothing."""
VALUE_CHECK = "values: "
"""What the message of an assertion begins with that a decomposition left, until the pass decomposed_checks keeps it or not."""

_INDEX_ERROR = "IndexError: "  # what the message of an assertion begins with for which eager raises one

_NO_MESSAGE = "Assertion is failed"
_NONE_FAILS = -1

Value = Tensor | IntLikeType | None
"""An input or output of a part."""


@dataclass(frozen=True, slots=True)
class Assertion:
    """What raises the error of an assertion.

    Attributes:
        message: the error's; of a factorization, the name of the function of `torch.linalg`.
        is_matrix: of a factorization, whether it is of one matrix, not of a batch; None for other assertions.
    """

    message: str
    is_matrix: bool | None = None


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


def _check_factorization(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    if is_functionalized(info):
        call_without_token(CHECK_FACTORIZATION, info, api_name, is_matrix=is_matrix)
    else:
        make_autograd_kernel(CHECK_FACTORIZATION)(info, api_name, is_matrix=is_matrix)


def capture_factorization_checks() -> AbstractContextManager[None]:
    """Context of a capture, in which checks of factorizations are captured as assertions.

    torch captures them as effects: ordered by a token, which is an input and an output of the graph.
    """
    return replace_python_kernels({CHECK_FACTORIZATION: {AUTOGRAD: _check_factorization}})


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


def find_assertions(graph: Graph) -> list[Node]:
    """Returns the calls of a graph that raise for some values, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in ASSERTIONS]


def take_assertions(module: GraphModule, found: Sequence[Node]) -> list[Assertion]:
    """Removes assertions from a graph, and adds results that tell which fail.

    The last result is the index of the first assertion that fails, else -1 (int64). In front of it are the `info` tensors of
    checks of factorizations, in order, of which eager's error tells the matrix.

    Args:
        module: a functional graph.
        found: its assertions, in order; those of `_assert_async` each on a one-element tensor. Without any, nothing is changed.
    """
    if not found:
        return []
    graph = module.graph
    output = graph.output_node()
    infos = [node.args[0] for node in found if node.target is CHECK_FACTORIZATION]
    with graph.inserting_before(output):
        number = _call(found[0], aten.full.default, [], _NONE_FAILS, dtype=torch.int64, device=_value(found[0]).device)
        for place, node in reversed(list(enumerate(found))):
            number = _call(node, aten.where.ScalarOther, _condition(node), number, place)
    taken = list(map(_describe, found))
    for node in found:
        graph.erase_node(node)
    output.args = ((*output.args[0], *infos, number),)  # type: ignore[misc]
    module.recompile()
    return taken


def _describe(node: Node) -> Assertion:
    if node.target is not CHECK_FACTORIZATION:
        return Assertion(str(node.args[1]) or _NO_MESSAGE)
    return Assertion(str(node.args[1]), bool(node.kwargs["is_matrix"]))


def raise_failed_assertions(
    function: Callable[[Sequence[Value]], list[Value]], assertions: Sequence[Assertion]
) -> Callable[[Sequence[Value]], list[Value]]:
    """Wraps a function whose last results `take_assertions` added: the wrapper raises the error of the first that fails.

    Raises (when called):
        RuntimeError, IndexOutOfRange, torch.linalg.LinAlgError: an assertion fails.
    """
    if not assertions:
        return function
    places = [place for place, assertion in enumerate(assertions) if assertion.is_matrix is not None]

    def run(args: Sequence[Value]) -> list[Value]:
        *results, number = function(args)
        if isinstance(number, FakeTensor):  # compiled for a device elsewhere: nothing was computed
            return results[: len(results) - len(places)]
        failed = int(number)  # type: ignore[arg-type]
        if failed != _NONE_FAILS:
            info = results[places.index(failed) - len(places)] if failed in places else None
            error = _make_error(assertions[failed], info)
            error.of_assertion = True  # type: ignore[attr-defined]
            raise error
        return results[: len(results) - len(places)]

    return run


def is_of_assertion(error: Exception) -> bool:
    """Whether an assertion of a compiled part raised an error: its program has run."""
    return hasattr(error, "of_assertion")


def _make_error(assertion: Assertion, info: Value) -> Exception:
    """
    Args:
        info: of a factorization: 0 for each matrix that has one.
    """
    message = assertion.message
    if assertion.is_matrix is not None:
        try:
            CHECK_FACTORIZATION(info, message, is_matrix=assertion.is_matrix)
        except RuntimeError as error:
            return error
    text = message.removeprefix(_INDEX_ERROR)
    return RuntimeError(message) if text == message else IndexOutOfRange(text)


def _condition(node: Node) -> Node:
    """Returns the condition of an assertion, a bool of no dims. NaN counts as true, as in eager."""
    condition = node.args[0]
    if node.target is CHECK_FACTORIZATION:
        return _call(node, aten.all.default, _call(node, aten.eq.Scalar, condition, 0))
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
