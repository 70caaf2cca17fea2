"""What became of a process's functions, as text."""

from __future__ import annotations

from dynaxla.breaks import breaks_without_graph
from dynaxla.process import read_metrics


def report() -> str:
    """The graphs in the order of their capture, each with the line where it ended early and Dynamo's reason, what runs in
    eager, and which parts have many programs, since the process began.

    A break without a graph is one before which nothing was captured or that lies inside of a loop: such a function, which is
    not known by its backend, runs in eager.
    """
    metrics = read_metrics()
    sections = {
        f"graphs captured: {len(metrics.captured)}, executables: {metrics.compiles}": metrics.captured,
        "breaks without a graph": breaks_without_graph(metrics.captured),
        "ops that run in eager": tuple(dict.fromkeys(metrics.fallbacks)),
        "compiled per exact shape": tuple(dict.fromkeys(metrics.exact_shapes)),
        "many programs": metrics.many_programs,
    }
    filled = {title: entries for title, entries in sections.items() if entries}
    return "\n".join("\n  ".join([title, *map(str, entries)]) for title, entries in filled.items())
