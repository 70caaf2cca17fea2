"""Captures `nn.LSTM`, `nn.GRU` and `nn.RNN` for this package's backend.

Dynamo ends the graph at these modules while its setting `allow_rnn` is off, as it is by default, for all backends. Where it
is on, Dynamo learns the sizes of a layer's results from torch's decomposition, one step of the sequence after another: the
length becomes a constant of the graph, and a capture takes as long as the sequence. Here it learns them from the first step.

Relies on `VariableBuilder.wrap_module`, which reads the setting, on its `tx.output.compiler_fn`, and on `config.patch`
changing a setting in the current thread alone; on the handlers of `TorchInGraphFunctionVariable`, by function, and on their
parameters; and on the Python kernels of `aten.lstm`, `aten.gru`, `aten.rnn_tanh` and `aten.rnn_relu`, which decompose them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import TorchInGraphFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy

from dynaxla.torch_api.dynamo import is_ours
from dynaxla.torch_api.python_kernels import AUTOGRAD, COMPOSITE, Kernel, python_kernels, replace_python_kernels

RNN_OPS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


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
