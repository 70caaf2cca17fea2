"""Functions of torch that Dynamo captures in another way for this package's backend.

`torch._check_tensor_all` is captured as an assertion. Dynamo reads the tensor's value there and ends the graph, although it
captures an equivalent `assert` on a tensor. transformers makes this check in every model that puts pictures or sounds among its
tokens, which splits one graph into five. Relies on the handlers of `TorchInGraphFunctionVariable`, by function, and on their
parameters; on `Tensor._is_all_true`; on `torch._assert_async`, which Dynamo emits for an `assert`; and on
`NestedUserFunctionVariable.get_function` for messages.

A generic `associative_scan` over a dynamic size is captured once for each power of two. torch's implementation halves the size
repeatedly, with a guard each time on whether it is even: Dynamo captures it again for nearly every size, so for nearly every
prompt length of a state space model. Relies on `generic_associative_scan`, which `associative_scan` looks up in its module and
Dynamo traces, on its arguments, and on `torch.compiler.assume_constant_result`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import SourcelessBuilder, wrap_fx_proxy
from torch._dynamo.variables.functions import ClosureConversionError, NestedUserFunctionVariable

from dynaxla.torch_api.dynamo import is_ours
from dynaxla.torch_api.frames import variables_of

_DEFAULT_MESSAGE = (
    "Expected cond to be True, but got False. (Could this error message be improved? If so, please report an enhancement "
    "request to PyTorch.)"
)


@cache
def capture_checks() -> None:
    """Has Dynamo capture checks of tensors as assertions for this package's backend, once per process.

    Unchanged: checks whose message formats tensors, and those that raise another error than RuntimeError.
    """
    handlers = TorchInGraphFunctionVariable._get_handlers()
    handlers[torch._check_tensor_all] = _capture_as_assert(handlers[torch._check_tensor_all])


def _capture_as_assert(check: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(check)
    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("cond", "message"), args, strict=False), **kwargs)
        cond, message = given.get("cond"), given.get("message")
        ours = is_ours(tx.output.compiler_fn)
        text = _message_text(message)
        if not ours or text is None or cond is None or not cond.is_tensor():
            return check(self, tx, *args, **kwargs)
        holds = cond.call_method(tx, "_is_all_true", [], {})
        arguments = proxy_args_kwargs((holds, SourcelessBuilder.create(tx, text)), {})
        proxy = tx.output.create_proxy("call_function", torch._assert_async, *arguments)
        return wrap_fx_proxy(tx=tx, proxy=proxy)

    return handle


def _message_text(message: Any) -> str | None:
    """Returns the error message of a check; None if it is known only when the check fails."""
    if message is None or message.is_constant_none():
        return _DEFAULT_MESSAGE
    if not isinstance(message, NestedUserFunctionVariable):
        return None
    try:
        return str(message.get_function()())
    except ClosureConversionError:  # the message uses tensors
        return None


_SMALLEST = 64
_MODULE = "torch._higher_order_ops.associative_scan"  # torch._higher_order_ops.associative_scan is a function


@cache
def capture_scans() -> None:
    """Has Dynamo capture generic scans padded to a power of two for this package's backend, once per process."""
    module: Any = sys.modules[_MODULE]
    scan = module.generic_associative_scan

    def padded_scan(
        operator: Callable[..., Any], leaves: Sequence[Tensor], dim: int = 0, additional_inputs: tuple[Any, ...] = ()
    ) -> Any:
        if not torch.compiler.is_compiling() or not _is_ours():
            return scan(operator, leaves, dim, additional_inputs)
        size = leaves[0].shape[dim]
        width = _SMALLEST
        while width < size:
            width *= 2
        # The padding repeats the last element: results of earlier elements do not depend on it, and it causes no
        # division by zero.
        indices = torch.arange(width, device=leaves[0].device).clamp(max=size - 1)
        wide = scan(operator, [leaf.index_select(dim, indices) for leaf in leaves], dim, additional_inputs)
        return [leaf.narrow(dim, 0, size) for leaf in wide]

    module.generic_associative_scan = padded_scan


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_ours() -> bool:
    at = variables_of("_compile", "torch._dynamo.convert_frame")
    return at is not None and is_ours(at["compiler_fn"])
