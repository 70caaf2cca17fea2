"""Under which key the executable of a program is kept on disk."""

from __future__ import annotations

from dynaxla.cache.environment_key import versions
from dynaxla.cache.key import Key
from dynaxla.lowering.call_graph import CallGraph
from dynaxla.ops.table import OpTable
from dynaxla.runtime.client import Client
from dynaxla.runtime.packaged_programs import Surroundings


def graph_key(graph: CallGraph, table: OpTable, precision: str | None, surroundings: Surroundings) -> Key | None:
    """The key of a graph, for which nothing needs to be lowered; None where its calls do not determine the program: the
    body of one is the user's, or a sub-graph with such a call.

    Args:
        table: what is known of the ops.
        precision: of float32 products.
        surroundings: with what it is compiled, and for what.
    """
    if not table.names_say_all(call.target for call, _ in graph.distinct.values()):
        return None
    parts = {name: getattr(surroundings, name) for name in ("jax", "client", "versions")}
    return Key.of(graph=graph.listing, precision=precision, **parts)


def module_key(module: bytes, client: Client) -> Key:
    """The key of a lowered module."""
    return Key.of(module=module, client=client.identity(), versions=versions())
