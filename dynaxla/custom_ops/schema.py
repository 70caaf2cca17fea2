"""How a call of an operator is read: its arguments by the names of its schema."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dynaxla.torch_api.overloads import OpOverload, parameters

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_LONG = 4  # how a schema writes the dtype int64; no other dtype is the default of a parameter


def default_of(parameter: torch.Argument) -> Any:
    """What a call that leaves a parameter of its overload out passes for it."""
    default = parameter.default_value
    return torch.int64 if default == _LONG and "ScalarType" in str(parameter.real_type) else default


def arguments_of(call: Node) -> dict[str, Any]:
    """The arguments of an op's call by their names in its schema, defaults filled in."""
    assert isinstance(call.target, OpOverload)
    given: dict[str, Any] = {}
    positional = list(call.args)
    for parameter in parameters(call.target):
        if positional and not parameter.kwarg_only:
            given[parameter.name] = positional.pop(0)
        else:
            given[parameter.name] = call.kwargs.get(parameter.name, default_of(parameter))
    return given


def argument(call: Node, name: str) -> Any:
    """What a call passes for the parameter `name` of its overload, or the schema's default.

    Raises:
        KeyError: the overload has no such parameter.
    """
    return arguments_of(call)[name]


def operand_dtype(call: Node, name: str) -> torch.dtype:
    """The dtype of an operand; where a plain number stands in a tensor's place, that of the tensor torch makes of it."""
    value = argument(call, name)
    return value.meta["val"].dtype if isinstance(value, Node) else _NUMBERS[type(value)]


def tensor_of(call: Node, name: str) -> torch.Tensor:
    """The fake tensor that stands for one argument.

    Raises:
        TypeError: the argument is no tensor.
    """
    value = argument(call, name)
    tensor = value.meta["val"] if isinstance(value, Node) else None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} of {call} is not a tensor")
    return tensor
