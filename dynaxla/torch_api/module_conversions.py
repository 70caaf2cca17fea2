"""Conversions of modules to other devices and dtypes: `to`, `cpu`, `half`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynaxla.torch_api.private_device import taken_name

_Convert = Callable[[torch.Tensor], torch.Tensor]

_IN_CPP = (torch.jit.ScriptModule, torch.nn.parallel.DistributedDataParallel)
_HELD = "the parameters of a {} cannot come to another device: C++ holds them, and would go on with what they were"
_NOT_AFTER = "a module's parameters came to another device between its forward and its backward"


def keep_parameters() -> None:
    """Has modules that come to the device, or leave it, keep their parameters, with their hooks, their attributes and what
    refers to them: those that are tied stay so, lazy ones stay lazy, and an optimizer that was made before has them still.

    For its own devices torch gives a parameter other data, which takes tensors of one kind; for others it makes new
    parameters, one for each place that a tied one has. Relies on `nn.Module._apply`, through which all conversions go, on
    `torch._C._swap_tensor_impl`, and on the class of a lazy parameter being all that makes it lazy.
    """
    own = torch.nn.Module._apply

    @wraps(own)
    def apply(module: torch.nn.Module, fn: _Convert, recurse: bool = True) -> torch.nn.Module:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if swaps or not _crosses(module, fn):
            return own(module, fn, recurse)  # type: ignore[no-any-return]
        done = {id(tensor) for tensor in _converted(module, fn, recurse)}
        return own(module, lambda x: x if id(x) in done else _converted_buffer(x, fn), recurse)  # type: ignore[no-any-return]

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _crosses(module: torch.nn.Module, fn: _Convert) -> bool:
    """Whether a module has parameters on the device, or what converts them gives tensors of it."""
    first = next(module.parameters(), None)
    if first is None:
        return False
    with torch.no_grad():
        return taken_name() in {first.device.type, fn(torch.empty(0, dtype=first.dtype, device="cpu")).device.type}


def _converted(module: torch.nn.Module, fn: _Convert, recurse: bool) -> Iterator[torch.Tensor]:
    """Converts the parameters and their gradients, and gives them; others' kinds of tensors are left to torch.

    A graph that saved a parameter has what it was from now on: its backward raises where it comes to the parameter.

    Raises:
        RuntimeError: the module is of a kind whose parameters C++ holds. None of them is converted then.
    """
    for each in module.modules():
        if isinstance(each, _IN_CPP):
            raise RuntimeError(_HELD.format(type(each).__name__))
    found = [p for p in module.parameters(recurse) if is_lazy(p) or not is_traceable_wrapper_subclass(p)]
    for parameter in found:
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None  # which holds it in C++
        try:
            with torch.no_grad(), _as_plain(parameter):
                _exchange(parameter, fn(parameter))
                if gradient is not None:
                    _exchange(gradient, fn(gradient))
        finally:
            if gradient is not None and gradient.device == parameter.device:
                parameter.grad = gradient
        yield parameter
        if gradient is not None:
            yield gradient


def _converted_buffer(buffer: torch.Tensor, fn: _Convert) -> torch.Tensor:
    own = type(buffer)
    with _as_plain(buffer):
        made = fn(buffer)
    if made is not buffer and issubclass(own, UninitializedBuffer):
        made.__class__ = own
    return made


@contextmanager
def _as_plain(tensor: torch.Tensor) -> Iterator[None]:
    """Within it a lazy tensor is an ordinary one without elements: torch refuses most of what is asked of a lazy one."""
    own = type(tensor)
    if not is_lazy(tensor):
        yield
        return
    tensor.__class__ = tensor.cls_to_become  # type: ignore[assignment, union-attr]
    try:
        yield
    finally:
        tensor.__class__ = own  # type: ignore[assignment]


def _exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives a tensor all that another one is, but for what hangs at the Python object."""
    if other is tensor:
        return
    hooks, later = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    made = other.detach().requires_grad_(tensor.requires_grad)
    node = _gradient_node(tensor)
    if node is not None:  # a backward pass that began before would put its gradients where nobody finds them
        node.register_prehook(_refuse)
    torch._C._swap_tensor_impl(tensor, made)
    # The hooks that are called hang at what was given away.
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = later


def _gradient_node(tensor: torch.Tensor) -> Any:
    """What adds to the tensor's gradient in graphs that there are; None if there are none."""
    if not (tensor.is_leaf and tensor.requires_grad) or tensor._use_count() == 1:  # type: ignore[attr-defined]
        return None
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _refuse(gradients: Any) -> NoReturn:
    raise RuntimeError(_NOT_AFTER)
