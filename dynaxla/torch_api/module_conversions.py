"""Conversions of modules to other devices and dtypes: `to`, `cpu`, `half`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynaxla.torch_api.private_device import get_registered_device_type

_Convert = Callable[[torch.Tensor], torch.Tensor]

_IN_CPP = (torch.jit.ScriptModule, torch.nn.parallel.DistributedDataParallel)
_HELD_BY_CPP = (
    "the parameters of a {} cannot come to another device: C++ holds them, and would go on with what they were"
)
_MOVED_BEFORE_BACKWARD = "a module's parameters came to another device between its forward and its backward"


def keep_parameters() -> None:
    """Has `Module.to` and similar conversions to and from the device preserve parameter objects with their hooks and
    attributes. Tied parameters stay tied, lazy ones stay lazy, and an existing optimizer still refers to them.

    For its own devices torch replaces a parameter's data, which needs tensors of one type; for others it makes new
    parameters, one for each use of a tied one. Relies on `nn.Module._apply`, through which all conversions go, on
    `torch._C._swap_tensor_impl`, and on lazy parameters differing from others only by their class.
    """
    own = torch.nn.Module._apply

    @wraps(own)
    def apply(module: torch.nn.Module, fn: _Convert, recurse: bool = True) -> torch.nn.Module:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if swaps or not _changes_device(module, fn):
            return own(module, fn, recurse)  # type: ignore[no-any-return]
        done = {id(tensor) for tensor in _convert_parameters(module, fn, recurse)}
        return own(module, lambda x: x if id(x) in done else _convert_buffer(x, fn), recurse)  # type: ignore[no-any-return]

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def move_states_of_fsdp() -> None:
    """Has `fully_shard` move a module on the host to the device, as it does to CUDA: it replaces a parameter's data, too.

    Relies on `torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device`.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    theirs = _fsdp_init._move_states_to_device

    @wraps(theirs)
    def move(params: list[Any], buffers: list[torch.Tensor], device: torch.device) -> None:
        if device.type == get_registered_device_type():
            for tensor in (*params, *buffers):
                if tensor.device.type == "cpu" and not is_traceable_wrapper_subclass(tensor):
                    _convert(tensor, lambda each: each.to(device))
        theirs(params, buffers, device)

    _fsdp_init._move_states_to_device = move


def _changes_device(module: torch.nn.Module, fn: _Convert) -> bool:
    """Whether a conversion moves a module's parameters to or from the device."""
    first = next(module.parameters(), None)
    if first is None:
        return False
    with torch.no_grad():
        return get_registered_device_type() in {
            first.device.type,
            fn(torch.empty(0, dtype=first.dtype, device="cpu")).device.type,
        }


def _convert_parameters(module: torch.nn.Module, fn: _Convert, recurse: bool) -> Iterator[torch.Tensor]:
    """Converts the parameters and their gradients in place, and yields them. Skips wrapper subclasses, which torch converts,
    and parameters on "meta", which torch replaces by new ones for every device.

    A graph that saved a parameter holds its old value from now on: its backward raises when it reaches the parameter.

    Raises:
        RuntimeError: the module is of a type whose parameters C++ references. No parameter is converted then.
    """
    for each in module.modules():
        if isinstance(each, _IN_CPP):
            raise RuntimeError(_HELD_BY_CPP.format(type(each).__name__))
    found = [p for p in module.parameters(recurse) if is_lazy(p) or not (p.is_meta or is_traceable_wrapper_subclass(p))]
    for parameter in found:
        _convert(parameter, fn)
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad


def _convert(parameter: torch.Tensor, fn: _Convert) -> None:
    gradient = parameter.grad
    if gradient is not None:
        parameter.grad = None  # the parameter references its gradient in C++
    try:
        with torch.no_grad(), _as_plain(parameter):
            _exchange(parameter, fn(parameter))
            if gradient is not None:
                _exchange(gradient, fn(gradient))
    finally:
        if gradient is not None and gradient.device == parameter.device:
            parameter.grad = gradient


def _convert_buffer(buffer: torch.Tensor, fn: _Convert) -> torch.Tensor:
    own = type(buffer)
    with _as_plain(buffer):
        converted_tensor = fn(buffer)
    if converted_tensor is not buffer and issubclass(own, UninitializedBuffer):
        converted_tensor.__class__ = own
    return converted_tensor


@contextmanager
def _as_plain(tensor: torch.Tensor) -> Iterator[None]:
    """Context in which a lazy tensor is an ordinary tensor without elements: torch refuses most ops on lazy ones."""
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
    """Gives a tensor the implementation of another one, but keeps the Python object's attributes."""
    if other is tensor:
        return
    hooks, later = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    converted_tensor = other.detach().requires_grad_(tensor.requires_grad)
    node = _gradient_node(tensor)
    if node is not None:  # a backward pass over an earlier graph would write its gradients to an unreferenced tensor
        node.register_prehook(_refuse)
    torch._C._swap_tensor_impl(tensor, converted_tensor)
    # torch calls the hooks of the implementation, which is now the other tensor's.
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = later


def _gradient_node(tensor: torch.Tensor) -> Any:
    """Returns the node that accumulates the tensor's gradient in existing graphs; None if there is no such graph."""
    if not (tensor.is_leaf and tensor.requires_grad) or tensor._use_count() == 1:  # type: ignore[attr-defined]
        return None
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _refuse(gradients: Any) -> NoReturn:
    raise RuntimeError(_MOVED_BEFORE_BACKWARD)
