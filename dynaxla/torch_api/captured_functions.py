"""Functions of torch that Dynamo captures in another way for this package's backend.

`torch._check_tensor_all` is captured as an assertion. Dynamo reads the tensor's value there and ends the graph, although it
captures an equivalent `assert` on a tensor. transformers makes this check in every model that puts pictures or sounds among its
tokens, which splits one graph into five. Relies on the handlers of `TorchInGraphFunctionVariable`, by function, and on their
parameters; on `Tensor._is_all_true`; on `torch._assert_async`, which Dynamo emits for an `assert`; and on
`NestedUserFunctionVariable.get_function` for messages.

A generic `associative_scan` over a dynamic size is captured once for each power of two. torch's implementation is a tree that
halves the size repeatedly, with a guard each time on whether it is even: Dynamo captures it again for nearly every size, so for
nearly every prompt length of a state space model. Where states are large and of constant sizes, it is captured as a loop over
places, `torch._higher_order_ops.scan`: a tree reads and writes all states several times. Relies on `generic_associative_scan`,
which `associative_scan` looks up in its module and Dynamo traces, on its arguments, on Dynamo knowing `has_static_value`, on
`peek_interpreter_stack`, and on `torch.compiler.assume_constant_result`.

`nn.LSTM`, `nn.GRU` and `nn.RNN` are captured. Dynamo ends the graph at these modules while its setting `allow_rnn` is off,
as it is by default, for all backends. Where it is on, Dynamo learns the sizes of a layer's results from torch's
decomposition, one step of the sequence after another: the length becomes a constant of the graph, and a capture takes as
long as the sequence. Here it learns them from the first step. Relies on `VariableBuilder.wrap_module`, which reads the
setting, on its `tx.output.compiler_fn`, and on `config.patch` changing a setting in the current thread alone; on the
handlers of `TorchInGraphFunctionVariable`; and on the Python kernels of `aten.lstm`, `aten.gru`, `aten.rnn_tanh` and
`aten.rnn_relu`, which decompose them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.functions import ClosureConversionError, NestedUserFunctionVariable
from torch._higher_order_ops import scan
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils._pytree import tree_leaves

from dynaxla.torch_api.dynamo import is_ours
from dynaxla.torch_api.frames import variables_of
from dynaxla.torch_api.python_kernels import AUTOGRAD, COMPOSITE, Kernel, python_kernels, replace_python_kernels

_DEFAULT_MESSAGE = (
    "Expected cond to be True, but got False. (Could this error message be improved? If so, please report an enhancement "
    "request to PyTorch.)"
)

RNN_OPS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


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
# Elements. By estimate, none was measured on a TPU, a loop over smaller states costs a TPU more than a tree. On a CPU, scans
# alone took less time as loops at all of the sizes that were tried.
_LARGE_STATE = 16384
_MODULE = "torch._higher_order_ops.associative_scan"  # torch._higher_order_ops.associative_scan is a function


@cache
def capture_scans() -> None:
    """Has Dynamo capture generic scans as loops, or padded to a power of two, for this package's backend, once per process."""
    module: Any = sys.modules[_MODULE]
    tree_scan = module.generic_associative_scan

    def captured_scan(
        operator: Callable[..., Any], leaves: Sequence[Tensor], dim: int = 0, additional_inputs: tuple[Any, ...] = ()
    ) -> Any:
        if not torch.compiler.is_compiling() or not is_captured_for_us():
            return tree_scan(operator, leaves, dim, additional_inputs)

        def combine(*operands: Tensor) -> list[Tensor]:
            return tree_leaves(operator(*operands, *additional_inputs))

        places = [leaf.movedim(dim, 0) for leaf in leaves]
        scanned = (
            _scan_in_order(combine, places)
            if _may_loop(combine, places)
            else _scan_padded(lambda wide: tree_scan(combine, wide), places)
        )
        return [leaf.movedim(0, dim) for leaf in scanned]

    module.generic_associative_scan = captured_scan


def _may_loop(combine: Callable[..., list[Tensor]], places: list[Tensor]) -> bool:
    """Whether a loop over the places is allowed and pays: a state is large, of constant sizes, and keeps shape and dtype."""
    firsts = [leaf[:1] for leaf in places]
    if not all(has_static_value(first.numel()) for first in firsts) or firsts[0].numel() < _LARGE_STATE:
        return False
    if places[0].shape[0] < 2 or _transforms_are_active():
        return False
    states = combine(*firsts, *firsts)
    return all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(states, firsts, strict=True))


def _scan_in_order(combine: Callable[..., list[Tensor]], places: list[Tensor]) -> list[Tensor]:
    """Scans tensors of [places, ...] by a loop over places."""

    def step(states: list[Tensor], place: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        following = [state.contiguous() for state in combine(*states, *place)]
        return following, [state.clone() for state in following]

    def step_or_begin(states: list[Tensor], place: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        begins, *leaves = place
        pairs = zip(leaves, combine(*states, *leaves), strict=True)
        following = [torch.where(begins, leaf, state).contiguous() for leaf, state in pairs]
        return following, [state.clone() for state in following]

    firsts = [leaf[:1].clone(memory_format=torch.contiguous_format) for leaf in places]
    if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in places):
        begins = torch.arange(places[0].shape[0], device=places[0].device) == 0
        _, states = scan(step_or_begin, firsts, [begins, *(leaf.unsqueeze(1) for leaf in places)])
        return [each.flatten(0, 1) for each in states]
    # The gradient of what `where` leaves out is zero times a derivative, which may be infinite.
    _, rest = scan(step, firsts, [leaf[1:].unsqueeze(1) for leaf in places])
    return [torch.cat([first, others.flatten(0, 1)]) for first, others in zip(firsts, rest, strict=True)]


def _scan_padded(scan_tree: Callable[[list[Tensor]], list[Tensor]], places: list[Tensor]) -> list[Tensor]:
    """Scans tensors of [places, ...], padded to a power of two places.

    The padding repeats the last element: results of earlier elements do not depend on it, and it causes no division by zero.
    """
    size, width = places[0].shape[0], _SMALLEST
    while width < size:
        width *= 2
    indices = torch.arange(width, device=places[0].device).clamp(max=size - 1)
    return [leaf[:size] for leaf in scan_tree([leaf.index_select(0, indices) for leaf in places])]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transforms_are_active() -> bool:
    """Whether a transform of torch.func, such as vmap, is active; a constant of the capture."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_captured_for_us() -> bool:
    """Whether Dynamo captures the caller for this package's backend; a constant of the capture."""
    at = variables_of("_compile", "torch._dynamo.convert_frame")
    return at is not None and is_ours(at["compiler_fn"])


@cache
def capture_rnns() -> None:
    """Has Dynamo capture recurrent layers for this package's backend, once per process. Others see torch's default."""
    VariableBuilder.wrap_module = _allow_rnn(VariableBuilder.wrap_module)  # type: ignore[method-assign]
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for name in RNN_OPS:
        handlers[getattr(torch, name)] = _capture_by_first_step


def _allow_rnn(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wrap)
    def wrap_module(self: Any, value: torch.nn.Module) -> Any:
        if not is_ours(self.tx.output.compiler_fn):
            return wrap(self, value)
        with config.patch(allow_rnn=True):
            return wrap(self, value)

    return wrap_module


def _capture_by_first_step(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Captures a call of a layer; None, by which Dynamo captures it as ever, for other backends."""
    if not is_ours(tx.output.compiler_fn):
        return None
    ops = [getattr(torch.ops.aten, name).input for name in RNN_OPS]
    changes = {op: dict.fromkeys((COMPOSITE, AUTOGRAD), _run_first_step(python_kernels(op)[AUTOGRAD])) for op in ops}
    proxy = tx.output.create_proxy("call_function", self.value, *proxy_args_kwargs(args, kwargs))
    with replace_python_kernels(changes):
        return wrap_fx_proxy(tx=tx, proxy=proxy)


def _run_first_step(run: Kernel) -> Kernel:
    """Returns a kernel whose results have the sizes, dtypes and need of gradients of those of `run`, which decomposes."""

    def run_first_step(input: Tensor, *settings: Any) -> tuple[Tensor, ...]:
        is_batch_first = settings[-1]
        steps = input.transpose(0, 1) if is_batch_first else input
        output, *last = run(steps[:1], *settings[:-1], False)
        output = output.expand(steps.shape[0], -1, -1).contiguous()
        return output.transpose(0, 1) if is_batch_first else output, *last

    return run_first_step
