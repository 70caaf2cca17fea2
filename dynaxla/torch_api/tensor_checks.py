"""Captures `torch._check_tensor_all` as an assertion.

Dynamo reads the tensor's value there and ends the graph, although it captures an equivalent `assert` on a tensor.
transformers makes this check in every model that puts pictures or sounds among its tokens, which splits one graph into
five.

Relies on the handlers of `TorchInGraphFunctionVariable`, by function, and on their parameters; on
`Tensor._is_all_true`; on `torch._assert_async`, which Dynamo emits for an `assert`; and on
`NestedUserFunctionVariable.get_function` for messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import SourcelessBuilder, wrap_fx_proxy
from torch._dynamo.variables.functions import ClosureConversionError, NestedUserFunctionVariable

from dynaxla.torch_api.dynamo import is_ours

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
