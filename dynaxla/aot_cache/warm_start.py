"""What is kept of a graph beside its recipe: enough for calls whose programs are on disk, and much less to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynaxla.aot_cache.serialized_graph import kept_options, reading
from dynaxla.bucketing.size_buckets import Policies
from dynaxla.options import Options
from dynaxla.partition.partition_result import Sketch
from dynaxla.torch_api.fakes import outside_of_modes
from dynaxla.torch_api.graph_pickling import CannotPickle, dumps, loads
from dynaxla.torch_api.modules import graph_module


@dataclass(frozen=True, slots=True)
class Drawn:
    """Attributes:
    policies, options, function: as in `Recipe`.
    """

    sketch: Sketch
    policies: Policies
    options: Mapping[str, Any]
    function: str


def written_drawn(sketch: Sketch, policies: Policies, options: Options, function: str) -> bytes | None:
    """Such a value as bytes; None where something of it is of this process alone."""
    try:
        with outside_of_modes():
            return dumps((sketch, policies, kept_options(options), function), ())
    except CannotPickle:
        return None


def read_drawn(content: bytes) -> Drawn:
    """What `written_drawn` gave.

    Raises:
        PackageError: something in it is not known here.
    """
    with reading():
        sketch, *terms = loads(content)
    if (aliases := sketch.aliases) is not None:  # its code is not kept
        views = graph_module(aliases.views, aliases.views.graph)
        sketch = replace(sketch, aliases=replace(aliases, views=views))
    return Drawn(sketch, *terms)
