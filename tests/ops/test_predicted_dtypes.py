"""Pointwise ops have the dtypes of eager's results in torch's fake kernels, or in this package's, or they are refused.

A program gives the predicted dtypes, so a prediction that differs from eager's result is a result that does. All ops of the op
table with one to three tensors are called with all dtypes, with dims and without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from dynaxla.decompositions.eager_dtypes import EAGER_DTYPES, call_as_eager
from dynaxla.ops.table import core_table
from dynaxla.partition.op_support import refusal
from dynaxla.torch_api.fakes import FakeTensorMode, make_uncached_mode
from dynaxla.torch_api.overloads import OpOverload, parameters
from tests.lists import quick

FEW = [torch.int64, torch.bool, torch.bfloat16, torch.float32, torch.complex64]
MOST = [*FEW, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.float64]
NUMBERS = {"number": 0.5, "float": 0.5, "int": 1, "bool": False}

Operand = tuple[torch.dtype, tuple[int, ...]]


def operands_of(op: OpOverload) -> dict[str, Any] | None:
    """Arguments by name, a tensor's as `Tensor`; None for an op with an argument of another kind. Defaults are left out."""
    given: dict[str, Any] = {}
    for parameter in parameters(op):
        kind = str(parameter.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            given[parameter.name] = Tensor
        elif not parameter.has_default_value():
            if kind not in NUMBERS:
                return None
            given[parameter.name] = NUMBERS[kind]
    return given


def ops_of(count: int) -> list[OpOverload]:
    """The pointwise ops of the table with this number of tensors."""
    found = []
    for op in core_table().records:
        given = operands_of(op) if torch.Tag.pointwise in op.tags else None
        if given is not None and sum(value is Tensor for value in given.values()) == count:
            found.append(op)
    return found


def fill(op: OpOverload, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments, and those that only have a name."""
    rest, args, kwargs = iter(tensors), list[Any](), dict[str, Any]()
    given = operands_of(op)
    assert given is not None
    for parameter in parameters(op):
        if parameter.name in given:
            value = next(rest) if given[parameter.name] is Tensor else given[parameter.name]
            kwargs[parameter.name] = value
            if not parameter.kwarg_only:
                args.append(kwargs.pop(parameter.name))
    return args, kwargs


def dtypes_of(results: Any) -> tuple[torch.dtype, ...]:
    return tuple(each.dtype for each in (results if isinstance(results, (list, tuple)) else [results]))


def is_refused(op: OpOverload, fakes: Sequence[Tensor], predicted: Any) -> bool:
    graph = Graph()
    nodes = [graph.placeholder(f"x{place}") for place in range(len(fakes))]
    for node, fake in zip(nodes, fakes, strict=True):
        node.meta["val"] = fake
    args, kwargs = fill(op, nodes)
    call = graph.call_function(op, tuple(args), kwargs)
    call.meta["val"] = predicted
    return refusal(call, core_table().records, torch.device("cpu")) is not None


def mispredicted(op: OpOverload, operands: Sequence[Operand], mode: FakeTensorMode) -> Iterator[str]:
    """Says what was predicted, where that is wrong and the call is not refused."""
    tensors = [torch.ones(shape, dtype=dtype) for dtype, shape in operands]
    args, kwargs = fill(op, tensors)
    try:
        expected = dtypes_of(op(*args, **kwargs))
    except (RuntimeError, NotImplementedError):
        return  # eager refuses it
    with mode:
        fakes = [torch.empty(shape, dtype=dtype) for dtype, shape in operands]
        args, kwargs = fill(op, fakes)
        try:
            predicted = call_as_eager(op, *args, **kwargs) if op in EAGER_DTYPES else op(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return  # Dynamo does not capture it
    if dtypes_of(predicted) != expected and not is_refused(op, fakes, predicted):
        yield f"{op} of {operands}: {dtypes_of(predicted)}, eager gives {expected}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtypes", quick([FEW, MOST], FEW), ids=["few", "most"])
def test_of_pointwise_ops(dtypes: Sequence[torch.dtype], count: int) -> None:
    """Of three tensors two have the same dtype."""
    ops, mode = ops_of(count), make_uncached_mode()
    assert ops
    wrong: list[str] = []
    for kinds in itertools.product(dtypes, repeat=count):
        if len(set(kinds)) == 3:
            continue
        for shapes in itertools.product(((3,), ()), repeat=count):
            for op in ops:
                wrong += mispredicted(op, tuple(zip(kinds, shapes, strict=True)), mode)
    assert not wrong
