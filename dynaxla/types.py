"""The frozen values that pass between the stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

DEVICE_TYPE = "dynaxla"
"""Of the tensors that live where PJRT computes."""

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
"""What XLA calls dtypes in its texts."""


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor whose last dim is innermost; an empty dim counts as one place, as in torch."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(sizes[dim], 1)
    return tuple(strides)


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the strides are these, but for those of dims of one element, which reach nothing."""
    return all(
        size <= 1 or mine == wanted for size, mine, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def with_strides(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor of these sizes and strides: the given one's memory where it lies so, else a copy.

    Args:
        tensor: has one element of each dim of stride 0.
    """
    if not has_strides(tensor, strides):
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = made.copy_(tensor)
        if tensor.shape == sizes:
            return tensor
    # Detached, as AOTAutograd would remake a view from its base, which may be a larger, padded tensor.
    return tensor.as_strided(sizes, strides).data


# What stands in a node's `meta` beside torch's own keys. torch's partitioners cut graphs and fx copies them, both by nodes:
# what has to be known of a node behind that goes along in its `meta` alone. Everything else is a field of a value.

KEPT_VIEW = "dynaxla_kept_view"
"""Its result has to be a view of its operand's memory, which only torch can make. Read where graphs are cut or run in eager."""

IN_PLACE = "dynaxla_in_place"
"""It writes into memory of an input, or names it, between two executables. Read where graphs are cut or run in eager."""

DONATED = "dynaxla_donated"
"""Of a placeholder: the graph's result of this number is its new value, for which an executable may take its memory. Set where
a graph comes to parts, and on a static graph, read where calls are linked."""

SAVED = "dynaxla_saved"
"""Only the backward reads this output of a forward, its strides included. Set where AOTAutograd lets the joint graph be cut,
read once, where it hands over the forward (`Saved.outputs`)."""

ORIGIN = "origin"
"""The name of the part's node that a node of a static graph stands for: what fails to compile there runs in eager here."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a forward keeps for the backward alone. It may lie in padded memory.

    Attributes:
        inputs: whether the graph's inputs may be such: it is a backward.
        outputs: which outputs are such.
    """

    inputs: bool = False
    outputs: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputSource:
    """Where one output of a part comes from: exactly one of the three.

    Attributes:
        result: index of the executable's result. `order` then permutes the result to torch's strides.
        argument: index of the part's argument that is handed through.
        value: a plain value known at compile time (a size, None).
        lies: torch's sizes and strides, where the result does not have them: they leave gaps, or repeat elements.
    """

    result: int | None = None
    argument: int | None = None
    value: object = None
    order: tuple[int, ...] | None = None
    lies: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def output(self, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
        """The output, of the executable's results and the part's arguments."""
        if self.result is not None:
            tensor = tensors[self.result]
            if self.lies is not None:
                return with_strides(tensor, *self.lies)
            # Strides, and not a view: autograd lets nobody write into a view that was made while it was off.
            return tensor if self.order is None else tensor.permute(self.order).data
        return self.value if self.argument is None else args[self.argument]


@dataclass(frozen=True, slots=True)
class StaticGraph:
    """A part specialized to fixed sizes: what lowering takes.

    Attributes:
        graph: placeholders are exactly the executable's arguments; outputs are exactly its results, all tensors.
        argument_orders: for each placeholder, the permutation that makes the caller's tensor row-major, or None.
        outputs: how the part's outputs are made from the results.
    """

    graph: torch.fx.Graph
    argument_orders: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[OutputSource, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor of fixed sizes.

    Attributes:
        nbytes: of all elements.
        strides: in elements, of such a row-major tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int = field(init=False, compare=False, repr=False)
    strides: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)
        object.__setattr__(self, "strides", row_major_strides(self.shape))

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}[{','.join(map(str, self.shape))}]"
