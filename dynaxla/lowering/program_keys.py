"""The keys of executables: of their graph, or of their lowered module."""

from __future__ import annotations

from dynaxla.cache.environment_key import Environment
from dynaxla.cache.key import Key
from dynaxla.cache.kinds import EXECUTABLE
from dynaxla.lowering.call_graph import CallGraph
from dynaxla.ops.table import OpTable
from dynaxla.options import Options


def graph_key(graph: CallGraph, table: OpTable, options: Options, environment: Environment) -> Key | None:
    """The key of a graph, for which nothing needs to be lowered; None where its calls do not determine the program: the
    body of one is the user's, or a sub-graph with such a call.

    Args:
        table: the records of the ops.
    """
    if not table.have_known_names(call.target for call, _ in graph.distinct.values()):
        return None
    return EXECUTABLE.key(options, environment, graph=graph.listing)


def module_key(module: bytes, options: Options, environment: Environment) -> Key:
    """The key of a lowered module."""
    return EXECUTABLE.key(options, environment, module=module)
