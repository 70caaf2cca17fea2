"""Reads the arguments of an operator's call by the names in its schema."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dynaxla.torch_api.overloads import OpOverload, parameters

_NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_LONG = 4  # the dtype int64 in a schema; no other dtype is the default of a parameter


def default_of(parameter: torch.Argument) -> Any:
    """Returns the default value of a parameter."""
    default = parameter.default_value
    return torch.int64 if default == _LONG and "ScalarType" in str(parameter.real_type) else default


def arguments_of(call: Node) -> dict[str, Any]:
    """Returns the arguments of an op's call by their names in its schema, with defaults filled in."""
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
    """Returns a call's argument for the parameter `name` of its overload, or the schema's default.

    Raises:
        KeyError: the overload has no such parameter.
    """
    return arguments_of(call)[name]


def operand_dtype(call: Node, name: str) -> torch.dtype:
    """Returns the dtype of an operand; for a Python number, the dtype of the tensor that torch makes of it."""
    value = argument(call, name)
    return value.meta["val"].dtype if isinstance(value, Node) else _NUMBER_DTYPES[type(value)]


def tensor_of(call: Node, name: str) -> torch.Tensor:
    """Returns the fake tensor of one argument.

    Raises:
        TypeError: the argument is no tensor.
    """
    value = argument(call, name)
    tensor = value.meta["val"] if isinstance(value, Node) else None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} of {call} is not a tensor")
    return tensor
