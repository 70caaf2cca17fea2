"""Frozen values that several stages of the pipeline pass to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

DEVICE_TYPE = "dynaxla"
"""Device type of tensors whose memory PJRT owns."""

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
"""Names of dtypes in XLA's texts."""

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of replicas or processes that compute together, by their numbers."""


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a row-major tensor; an empty dim counts as one element, as in torch."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(sizes[dim], 1)
    return tuple(strides)


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; strides of dims of one element, which have no effect, are ignored."""
    return all(
        size <= 1 or mine == wanted for size, mine, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def restride(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Returns a tensor with these sizes and strides: in the memory of `tensor` if that has the strides, else a copy. What is
    empty has memory of torch's own.

    Args:
        tensor: has one element in each dim of stride 0.
    """
    if not has_strides(tensor, strides) or not tensor.numel():
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = made.copy_(tensor)
        if tensor.shape == sizes:
            return tensor
    # Detached, since AOTAutograd would compute a view again from its base, which may be a larger, padded tensor.
    return tensor.as_strided(sizes, strides).data


# Keys that the package adds to a node's `meta`. torch's partitioners split graphs and fx copies them, both node by node: only
# `meta` carries properties of a node along. All other information is in fields of values.

KEPT_VIEW = "dynaxla_kept_view"
"""The result must be a view of the operand's memory, which only torch can make. Read by the partitioner and in eager."""

IN_PLACE = "dynaxla_in_place"
"""The node writes to an input's memory, or refers to it, between executables. Read by the partitioner and in eager."""

DONATED = "dynaxla_donated"
"""On a placeholder: index of the graph's result that is its new value, so that an executable may reuse the
placeholder's memory for it. Set when a graph is split into parts, and on a static graph; read when calls are linked."""

NOT_DONATED = "dynaxla_not_donated"
"""On a placeholder that the graph writes to: why no executable takes its memory, with the user's line. Read by `explain`."""

SAVED = "dynaxla_saved"
"""Only the backward reads this output of a forward, and its strides. Set when AOTAutograd partitions the joint graph;
read once, when it compiles the forward (`Saved.outputs`)."""

MODULE_PATH = "dynaxla_module"
"""Path of the user's module that a node computes for, such as "layers.0.attention", with "/backward" behind it in a
backward. Set when AOTAutograd hands a graph over; read when calls are linked."""

SUBGRAPHS = "dynaxla_subgraphs"
"""The modules of the graphs that a call of a higher-order operator computes, in the order of its arguments. Set when the call
becomes an operator; read when calls are linked, and by `explain`."""

SOURCE = ("stack_trace", MODULE_PATH, SUBGRAPHS)
"""What says where in the user's program a node comes from: a node that is made for another one takes it over."""

OWN_BACKWARD = "dynaxla_own_backward"
"""On a node of a backward: a number of the call of a user's `autograd.Function` of whose `backward` it is. Set when AOTAutograd
hands a backward over, and read where gradients are undefined."""

GRADIENT_SUM = "dynaxla_gradient_sum"
"""On a node of a backward: it is a sum of two gradients of one value, which autograd made. Set and read as `OWN_BACKWARD`."""

ORIGIN = "origin"
"""Name of the part's node from which a static graph's node was made: the one runs in eager if the other fails to
compile."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Activations that a forward saves only for the backward. Their memory may be padded.

    Attributes:
        inputs: whether the graph is a backward, so that its inputs may be saved activations.
        outputs: positions of the outputs that are saved activations.
        in_training: whether the graph is the forward or backward of a training step, whose weights change from call to call.
    """

    inputs: bool = False
    outputs: frozenset[int] = frozenset()
    in_training: bool = False


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """The inputs of a backward where some gradients of the forward's results are undefined, as autograd calls it: nothing was
    differentiated of these results.

    Attributes:
        gradients: positions of all gradients among the backward's inputs.
        undefined: the positions of those that are undefined.
        kept: the positions of the inputs that are computed with. Of an undefined gradient among them the shape is read alone.
    """

    gradients: tuple[int, ...]
    undefined: frozenset[int]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputSource:
    """The source of one output of a part: exactly one of result, argument and value.

    Attributes:
        result: index of the executable's result. `order` then permutes the result to torch's strides.
        argument: index of the part's argument that is returned unchanged.
        value: a Python value known at compile time (a size, None).
        torch_layout: torch's sizes and strides, if a permuted row-major result cannot have them: they leave gaps, repeat
            elements, or are others in dims of one element; or if the result is empty, so that torch may resize it.
    """

    result: int | None = None
    argument: int | None = None
    value: object = None
    order: tuple[int, ...] | None = None
    torch_layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def output(self, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
        """Returns the output, given the executable's results and the part's arguments."""
        if self.result is not None:
            tensor = tensors[self.result] if self.order is None else tensors[self.result].permute(self.order)
            if self.torch_layout is not None:
                return restride(tensor, *self.torch_layout)
            # `.data`, so that it is no view: autograd forbids writes to a view that was made in no-grad mode.
            return tensor if self.order is None else tensor.data
        return self.value if self.argument is None else args[self.argument]


@dataclass(frozen=True, slots=True)
class StaticGraph:
    """A part specialized to fixed sizes: the input of lowering.

    Attributes:
        graph: placeholders are exactly the executable's arguments; outputs are exactly its results, all tensors.
        argument_orders: for each placeholder, the permutation that makes the caller's tensor row-major, or None.
        outputs: the source of each output of the part.
    """

    graph: torch.fx.Graph
    argument_orders: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[OutputSource, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor of fixed sizes.

    Attributes:
        nbytes: size of all elements.
        strides: strides of a row-major tensor of this shape, in elements.
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
