"""Writes the text of `dynaxla.report`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from dynaxla.observe.collectives import list_collectives
from dynaxla.observe.graph_breaks import breaks_without_graph
from dynaxla.observe.recorder import Metrics


def write_report(metrics: Metrics, not_captured: Collection[str], partitioned: Mapping[str, Sequence[str]]) -> str:
    """The text of `dynaxla.report`.

    Args:
        metrics: the counters.
        not_captured: names of torch.nn's classes with a module that was compiled in place.
        partitioned: by what programs over meshes compute, their optimized HLO.
    """
    sections: dict[str, Sequence[object]] = {
        "breaks without a graph": breaks_without_graph(metrics.captured),
        "compiled in place, and nothing captured": [_nothing_captured(name) for name in sorted(not_captured)],
        "ops that run in eager": tuple(dict.fromkeys(metrics.fallbacks)),
        "compiled per exact shape": tuple(dict.fromkeys(metrics.exact_shapes)),
        "many programs": metrics.many_programs,
        "captured as often as Dynamo allows": metrics.last_captures,
        "collectives": [
            line for what, texts in partitioned.items() for line in map(partial(_sum_up, what), texts) if line
        ],
    }
    graphs = f"graphs captured: {len(metrics.captured)}, executables: {metrics.executables}"
    filled = {graphs: metrics.captured} | {title: entries for title, entries in sections.items() if entries}
    return "\n".join("\n  ".join([title, *map(str, entries)]) for title, entries in filled.items())


def _sum_up(what: str, hlo_text: str) -> str:
    """The collectives of a program, those of one kind together; empty if it has none."""
    found: dict[str, list[int]] = {}
    for each in list_collectives(hlo_text):
        found.setdefault(each.kind, []).extend([each.nbytes] * each.runs)
    listed = ", ".join(f"{len(sizes)} {kind} of {sum(sizes)} bytes" for kind, sizes in found.items())
    return f"{what}: {listed}" if listed else ""


def _nothing_captured(name: str) -> str:
    return (
        f"{name}.compile(): Dynamo leaves torch.nn's own code to Python, so that only modules of other classes within it are "
        'compiled, one by one; torch.compile(module, backend="dynaxla") compiles all of it'
    )
