"""A graph that is one part or several; and what is left of one for a process that finds its programs on disk."""

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
class Whole:
    """A graph of which all is one compiled part.

    Attributes:
        messages: of its assertions.
    """

    graphs: PartGraphs
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A graph of which some runs in eager.

    Attributes:
        root: as in `Partition`.
        reasons: one per node that does.
        weights: positions of the inputs that keep their values between most calls.
        constants: values of the last placeholders.
    """

    root: GraphModule
    reasons: tuple[FallbackReason, ...]
    weights: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    saved: Saved


@dataclass(frozen=True, slots=True)
class Sketch:
    """What calls take of a graph that is one part, but for its programs.

    Attributes:
        circumstances: a digest of what the passes that made the part go by, beside the graph, its policies and options.
        device: what torch computes the graph on.
        facts, known: of the part.
        messages: of its assertions.
        seeds: the devices of its random draws.
        aliases: the outputs that torch makes, or None.
    """

    circumstances: str
    device: torch.device
    facts: PartSignature
    known: PartIdentity
    messages: tuple[str, ...]
    seeds: tuple[torch.device, ...]
    aliases: Aliases | None
