"""Whether two outputs of a model are the same thing: same structure, same dtypes, values close."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_SCALARS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
# Which class a cache makes its layers of is how it grows, not what it holds.
_NOT_CONTENT = ("layer_class_to_replicate",)


class StructureMismatchError(AssertionError):
    """Two outputs differ in paths, leaf types, shapes or dtypes."""


def flatten_outputs(out: Any) -> list[tuple[str, Any]]:
    """List every leaf of a model's output with its path, in a fixed order.

    Mappings (also ModelOutput), sequences and dataclasses are opened; any other object, such as a key-value cache
    and its layers, is opened by its attributes. Leaves are tensors, scalars, strings, dtypes, devices and None.
    Raises TypeError for what is none of these.
    """
    return [(path, leaf) for path, leaf in _walk("out", out) if not isinstance(leaf, type)]


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, *_SCALARS)):
        yield path, value
        return
    # The class of a container stands before its children: () is not {}, and a list is not a tuple.
    yield path, type(value)
    for step, child in _children(path, value):
        yield from _walk(path + step, child)


def _children(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple | list):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        raise TypeError(f"{path} is a {type(value).__name__}, which is no leaf and cannot be opened")
    return [(f".{name}", child) for name, child in sorted(vars(value).items()) if name not in _NOT_CONTENT]


def assert_same_structure(actual: Any, expected: Any) -> None:
    """Raise StructureMismatchError unless containers and leaves agree in path, class, shape and dtype.

    Leaves that are neither tensors nor floats must be equal.
    """
    left, right = list(_walk("out", actual)), list(_walk("out", expected))
    paths_left, paths_right = [path for path, _ in left], [path for path, _ in right]
    if paths_left != paths_right:
        odd = sorted(set(paths_left) ^ set(paths_right)) or ["the order of leaves"]
        raise StructureMismatchError(f"{type(actual).__name__} against {type(expected).__name__}: {odd[:5]}")
    for (path, a), (_, b) in zip(left, right, strict=True):
        if _leaf_kind(a) != _leaf_kind(b):
            raise StructureMismatchError(f"{path}: {_leaf_kind(a)} against {_leaf_kind(b)}")


def _leaf_kind(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        return "tensor", tuple(leaf.shape), leaf.dtype, leaf.device.type
    if isinstance(leaf, float):
        return ("float",)
    if isinstance(leaf, type):
        return "container", leaf
    return type(leaf).__name__, leaf


def max_relative_error(actual: Any, expected: Any) -> float:
    """The largest error of any leaf, relative to the largest finite absolute value in the expected leaf.

    Zero where integers, booleans and everything exact agree; infinite where they do not, where NaN or infinity
    stands in different places, or where a value differs from an expected leaf of zeros only.
    Raises StructureMismatchError where the outputs are not comparable.
    """
    return worst_leaf(actual, expected)[1]


def worst_leaf(actual: Any, expected: Any) -> tuple[str, float]:
    """Path and relative error of the leaf that differs most; ("", 0.0) where nothing does."""
    assert_same_structure(actual, expected)
    worst = ("", 0.0)
    for (path, a), (_, b) in zip(flatten_outputs(actual), flatten_outputs(expected), strict=True):
        error = _leaf_error(a, b)
        if error > worst[1]:
            worst = (path, error)
    return worst


def _leaf_error(actual: Any, expected: Any) -> float:
    if isinstance(expected, float):
        return _tensor_error(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
    if not isinstance(expected, torch.Tensor):
        return 0.0
    return _tensor_error(actual, expected)


def _tensor_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return math.inf
    if not torch.equal(actual[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)):
        return math.inf
    if not finite.any():
        return 0.0
    difference = (actual[finite] - expected[finite]).abs().max().item()
    scale = expected[finite].abs().max().item()
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf
