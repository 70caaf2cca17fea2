"""Writes the text of `dynaxla.report`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dynaxla.observe.graph_breaks import breaks_without_graph
from dynaxla.observe.recorder import Metrics


def write_report(metrics: Metrics, not_captured: Collection[str]) -> str:
    """The text of `dynaxla.report`.

    Args:
        metrics: the counters.
        not_captured: names of torch.nn's classes with a module that was compiled in place.
    """
    sections: dict[str, Sequence[object]] = {
        "breaks without a graph": breaks_without_graph(metrics.captured),
        "compiled in place, and nothing captured": [_nothing_captured(name) for name in sorted(not_captured)],
        "ops that run in eager": tuple(dict.fromkeys(metrics.fallbacks)),
        "compiled per exact shape": tuple(dict.fromkeys(metrics.exact_shapes)),
        "many programs": metrics.many_programs,
        "captured as often as Dynamo allows": metrics.last_captures,
    }
    graphs = f"graphs captured: {len(metrics.captured)}, executables: {metrics.executables}"
    filled = {graphs: metrics.captured} | {title: entries for title, entries in sections.items() if entries}
    return "\n".join("\n  ".join([title, *map(str, entries)]) for title, entries in filled.items())


def _nothing_captured(name: str) -> str:
    return (
        f"{name}.compile(): Dynamo leaves torch.nn's own code to Python, so that only modules of other classes within it are "
        'compiled, one by one; torch.compile(module, backend="dynaxla") compiles all of it'
    )
