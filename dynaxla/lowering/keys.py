"""Under which key the executable of a program is kept on disk."""

from __future__ import annotations

from dynaxla.cache.key import Key
from dynaxla.cache.surroundings import versions
from dynaxla.lowering.calls import CallGraph
from dynaxla.ops.table import OpTable, core_table
from dynaxla.runtime.client import Client
from dynaxla.runtime.xla import settings


def graph_key(graph: CallGraph, table: OpTable, precision: str | None, client: Client) -> Key | None:
    """The key of a graph, for which nothing needs to be lowered; None where its calls do not determine the program: the
    body of one is the user's, or a sub-graph.

    Args:
        table: what is known of the ops.
        precision: of float32 products.
    """
    own = core_table().records
    if any(table.records.get(call.target) is not own.get(call.target) for call, _ in graph.distinct.values()):
        return None
    return Key.of(
        graph=graph.listing, precision=precision, jax=settings(), client=client.identity(), versions=versions()
    )


def module_key(module: bytes, client: Client) -> Key:
    """The key of a lowered module."""
    return Key.of(module=module, client=client.identity(), versions=versions())
