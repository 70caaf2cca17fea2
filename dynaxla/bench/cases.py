"""What is measured: a case, with its ways to run. Who makes cases knows models and backends; who measures them does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Run: TypeAlias = Callable[[int], Any]
"""Runs the input of a number, and gives its results."""

Prepare: TypeAlias = Callable[[], Run]
"""Makes a run: copies a model, calls torch.compile. It computes nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """Attributes:
    name: of the case.
    ways: by name, in the order in which they take turns.
    baseline: the way whose results are right, and to whose time others are compared.
    inputs: of each its sizes that vary, by name; one empty mapping where none do.
    check: when results are compared: in the first pass, always (outside of what is timed), or never, as where they are random.
    exact: makes a run in float64; without a `tolerance`, results that differ are the same if they are as near to its results.
    tolerance: largest relative error; None: that of the dtype.
    read: makes tensors or numbers of a way's results.
    in_turn: False measures way by way, where what one frees would slow down the next.
    settle: called between the first pass and the rounds with the ways that are right.
    items, unit: how much a run processes, of what, for a rate.
    about: what is measured, for a reader.
    """

    name: str
    ways: Mapping[str, Prepare]
    baseline: str = "eager"
    inputs: Sequence[Mapping[str, int]] = ({},)
    check: Literal["first", "always", "never"] = "first"
    exact: Prepare | None = None
    tolerance: float | None = None
    read: Callable[[Any], Any] = lambda results: results
    in_turn: bool = True
    settle: Callable[[Mapping[str, Run]], None] | None = None
    items: float = 0.0
    unit: str = ""
    about: str = ""
