"""The result of partitioning: a graph that is one part or several; and the stored form of a graph that is one part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from dynaxla.diagnostics import FallbackReason
from dynaxla.partition.output_views import Aliases
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.part_signature import PartIdentity, PartSignature
from dynaxla.types import Saved


@dataclass(frozen=True, slots=True)
class WholePart:
    """A graph that is one compiled part.

    Attributes:
        messages: messages of its assertions.
    """

    graphs: PartGraphs
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A graph with nodes that run in eager.

    Attributes:
        root: as in `Partition`.
        reasons: one for each node that runs in eager.
        weights: positions of the inputs whose values rarely change between calls.
        constants: values of the last placeholders.
    """

    root: GraphModule
    reasons: tuple[FallbackReason, ...]
    weights: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    saved: Saved


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A stored graph that is one part: all that calls need, except its programs.

    Attributes:
        circumstances: digest of the inputs of the passes, other than the graph, its policies and options.
        device: the device on which torch computes the graph.
        facts, known: the part's `PartFacts` and `Known`.
        messages: messages of its assertions.
        seeds: the devices of its random draws.
        aliases: the outputs that torch computes as views, or None.
    """

    circumstances: str
    device: torch.device
    facts: PartSignature
    known: PartIdentity
    messages: tuple[str, ...]
    seeds: tuple[torch.device, ...]
    aliases: Aliases | None
