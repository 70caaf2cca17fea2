"""Results lie in memory as eager's do: their dtypes and strides, and which of them share memory with what.

Used wherever programs are run and compared: random ones, and the cases of pad rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Predict: TypeAlias = Callable[[], Sequence[Tensor]]
"""Gives what torch's own capture predicts: fake tensors of every value that it makes, in any order."""


def assert_same_layout(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    inputs: Sequence[Tensor],
    eager_inputs: Sequence[Tensor],
    predict: Predict = tuple,
) -> None:
    """Asserts that results have eager's dtypes and strides, need gradients as eager's do, and that a write into one is seen
    where eager's is seen.

    All of them are written to.

    Args:
        inputs: those that gave `actual`.
        eager_inputs: those that gave `expected`.
        predict: as for `assert_same_strides`, for dims of one element alone: others have eager's strides.
    """
    for place, (mine, eager) in enumerate(zip(actual, expected, strict=True)):
        assert mine.dtype is eager.dtype, f"result {place}: dtype {mine.dtype}, expected {eager.dtype}"
        assert mine.requires_grad == eager.requires_grad, f"result {place}: requires_grad {mine.requires_grad}"
        assert _stepping_strides(mine) == _stepping_strides(eager), (
            f"result {place}: strides {mine.stride()}, expected {eager.stride()}"
        )
    assert_same_strides(actual, expected, predict)
    assert_same_sharing(actual, expected, inputs, eager_inputs)


def assert_same_strides(actual: Sequence[Tensor], expected: Sequence[Tensor], predict: Predict = tuple) -> None:
    """Asserts that strides are eager's, or where torch's own capture predicts others, those.

    Fake tensors have others for a few ops (sorts and sums with numbers in dims of one element), and for a write in place that
    capture turns into a new tensor (`masked_fill_` of a transposed tensor).
    """
    if all(telling_strides(mine) == telling_strides(eager) for mine, eager in zip(actual, expected, strict=True)):
        return
    predicted = predict()
    for place, (mine, eager) in enumerate(zip(actual, expected, strict=True)):
        alike = [other for other in (eager, *predicted) if mine.shape == other.shape]
        same = any(telling_strides(mine) == telling_strides(other) for other in alike)
        assert same, f"result {place}: strides {mine.stride()}, expected {eager.stride()}"


def assert_same_sharing(
    actual: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor], eager_inputs: Sequence[Tensor]
) -> None:
    """As `assert_same_layout`, of what shares memory alone."""
    for place in range(len(expected)):
        changed = _changed_by(place, actual, inputs)
        wanted = _changed_by(place, expected, eager_inputs)
        assert changed == wanted, f"a write into result {place} changed {changed}, expected {wanted}"


def telling_strides(tensor: Tensor) -> list[int]:
    """Those that reach something: all but an empty tensor's."""
    return list(tensor.stride()) if tensor.numel() else []


def _stepping_strides(tensor: Tensor) -> list[int]:
    """Those of dims of more than one element."""
    return [step for size, step in zip(tensor.shape, telling_strides(tensor), strict=False) if size > 1]


def _changed_by(place: int, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[str]:
    """What a write into one result changes."""
    watched = {f"result {i}": x for i, x in enumerate(results)} | {f"input {i}": x for i, x in enumerate(inputs)}
    before = {name: _bytes(x) for name, x in watched.items()}
    _write(results[place].detach())
    return [name for name, x in watched.items() if not torch.equal(_bytes(x), before[name])]


def _write(result: Tensor) -> None:
    """Changes every element; what is expanded has each once."""
    for dim, (size, stride) in enumerate(zip(result.shape, result.stride(), strict=True)):
        if stride == 0 and size > 1:
            result = result.narrow(dim, 0, 1)
    result.copy_(torch.where(result == 7, 5, 7) if result.dtype is not torch.bool else ~result)


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)
