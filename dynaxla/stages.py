"""The frozen values that pass between the stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KEPT_VIEW = "dynaxla_kept_view"
"""Key in the `meta` of nodes whose result has to be a view of their operand's memory, which only torch can make."""

IN_PLACE = "dynaxla_in_place"
"""Key in the `meta` of nodes that write into memory of an input, or name it, between two executables."""

REFUSED_REGION = "dynaxla_refused_region"
"""Key in the `meta` of higher-order calls that run in eager: why."""

SAVED = "dynaxla_saved"
"""Key in the `meta` of outputs of a forward graph that only the backward reads: their strides are nobody's business."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A functional ATen graph from AOTAutograd, rewritten for lowering.

    Attributes:
        module: the graph; its placeholders are AOTAutograd's inputs in order, then one for each of `constants`.
        static_inputs: indices of the inputs that are weights: parameters and buffers that keep their tensor identity
            between calls and that the graph does not mutate.
        constants: tensors that the graph carried as attributes, lifted to inputs.
    """

    module: torch.fx.GraphModule
    static_inputs: frozenset[int]
    constants: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputSource:
    """Where one output of a part comes from: exactly one of the three.

    Attributes:
        result: index of the executable's result. `order` then permutes the result to torch's strides.
        argument: index of the part's argument that is handed through.
        value: a plain value known at compile time (a size, None).
    """

    result: int | None = None
    argument: int | None = None
    value: object = None
    order: tuple[int, ...] | None = None


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
