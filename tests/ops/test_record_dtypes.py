"""Where eager's kernel refuses a dtype and tracing does not, the record refuses it too: the user gets eager's error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dynaxla.ops.dtypes import STORED, XLA_DTYPES
from dynaxla.ops.table import core_table
from tests.ops.rule_check import refusal

Call = tuple[tuple[Any, ...], dict[str, Any]]

SHAPES = ((2, 2), (2,), (2, 2, 2), (1, 2, 2, 2))
REFUSED = (RuntimeError, NotImplementedError, TypeError, IndexError, KeyError, ValueError, AssertionError)
# Eager's batch norm reads beyond statistics of the wrong length, and layer norm's meta function divides by zero.
LEFT_OUT = ("batch_norm", "layer_norm")


def _argument(parameter: torch.Argument, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """A value for one parameter.

    Raises:
        LookupError: no value is right for all ops.
    """
    kind = str(parameter.type)
    if kind == "Tensor":
        return torch.ones(shape, dtype=dtype)
    if parameter.has_default_value():
        return parameter.default_value
    if kind.startswith("Optional"):
        return None
    if parameter.name == "dim":
        return 0 if kind == "int" else [0]
    return {"number": 1, "float": 1.0, "bool": False}[kind]


def _call(target: OpOverload, dtype: torch.dtype, shape: tuple[int, ...]) -> Call:
    given = [(p, _argument(p, dtype, shape)) for p in target._schema.arguments]
    return tuple(v for p, v in given if not p.kwarg_only), {p.name: v for p, v in given if p.kwarg_only}


def _runs(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        function(*args, **kwargs)
    except REFUSED:
        return False
    return True


def _traced(target: OpOverload, call: Call) -> list[torch.Tensor] | None:
    """Fake results, or None where tracing raises, as eager does."""
    with FakeTensorMode() as mode:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, call)
        try:
            results = target(*args, **kwargs)
        except REFUSED:
            return None
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _calls(target: OpOverload) -> dict[torch.dtype, Call]:
    """Calls in every dtype, of a shape with which eager takes at least one of them."""
    for shape in SHAPES:
        calls = {dtype: _call(target, dtype, shape) for dtype in sorted(STORED, key=str)}
        if any(_runs(target, *call) for call in calls.values()):
            return calls
    raise LookupError(f"no shape suits {target}")


def _targets() -> Iterator[OpOverload]:
    for target in sorted(core_table().records, key=str):
        if target.namespace == "aten" and not any(name in str(target) for name in LEFT_OUT):
            try:
                _call(target, torch.float32, (1,))
            except LookupError:
                continue
            yield target


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", _targets(), ids=str)
def test_a_dtype_that_eager_refuses_is_not_in_the_record(target: OpOverload, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    try:
        calls = _calls(target)
    except LookupError:
        pytest.skip("the schema does not say which calls are right")
    record = core_table().records[target]
    for dtype, call in calls.items():
        traced = None if _runs(target, *call) else _traced(target, call)
        if traced is None:
            continue
        met = {dtype, *(result.dtype for result in traced)}
        allowed = XLA_DTYPES if record.dtypes is None else record.dtypes
        assert met - allowed or refusal(target, *call), f"eager refuses {dtype}"


def test_most_of_the_table_is_looked_at() -> None:
    assert len(list(_targets())) > 300


def test_a_record_claims_only_dtypes_that_programs_have() -> None:
    claimed = {str(record.target): record.dtypes - STORED for record in core_table().records.values() if record.dtypes}
    assert {target: odd for target, odd in claimed.items() if odd} == {}
