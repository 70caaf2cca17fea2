"""The frozen values that pass between the stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What stands in a node's `meta` beside torch's own keys. torch's partitioners cut graphs and fx copies them, both by nodes:
# what has to be known of a node behind that goes along in its `meta` alone. Everything else is a field of a value.

KEPT_VIEW = "dynaxla_kept_view"
"""Its result has to be a view of its operand's memory, which only torch can make. Read where graphs are cut or run in eager."""

IN_PLACE = "dynaxla_in_place"
"""It writes into memory of an input, or names it, between two executables. Read where graphs are cut or run in eager."""

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
