"""Writes the text of `dynaxla.report`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dynaxla.observe.collectives import list_collectives
from dynaxla.observe.graph_breaks import breaks_without_graph
from dynaxla.observe.recorder import Metrics
from dynaxla.observe.usage import PartCalls


def write_report(
    metrics: Metrics, not_captured: Collection[str], partitioned: Collection[tuple[str, bool, str]]
) -> str:
    """The text of `dynaxla.report`.

    Args:
        metrics: the counters.
        not_captured: names of torch.nn's classes with a module that was compiled in place.
        partitioned: of programs over meshes what they compute, whether that is a part of a compiled graph, which is listed
            also without collectives, and the optimized HLO.
    """
    sections: dict[str, Sequence[object]] = {
        "breaks without a graph": breaks_without_graph(metrics.captured),
        "compiled in place, and nothing captured": [_nothing_captured(name) for name in sorted(not_captured)],
        "results that are not eager's": metrics.divergences,
        "not verified": tuple(dict.fromkeys(metrics.unverified)),
        "ops that run in eager": tuple(dict.fromkeys(metrics.fallbacks)),
        "compiled per exact shape": tuple(dict.fromkeys(metrics.exact_shapes)),
        "many programs": metrics.many_programs,
        "not compiled in a child process": metrics.unshipped,
        "captured as often as Dynamo allows": metrics.last_captures,
        "programs over meshes, and their collectives": [
            f"{what}: {sums or 'no collective'}"
            for what, is_part, hlo_text in partitioned
            if (sums := _sum_up(hlo_text)) or is_part
        ],
        "stages": [f"{name}: {use.runs} in {use.seconds:.1f} s" for name, use in metrics.stages.items() if use.runs],
        "cache": [f"{tier}: {use.hits} hits, {use.misses} misses" for tier, use in metrics.cache.items()],
        "calls": list(map(_sum_up_calls, metrics.parts)),
    }
    graphs = f"graphs captured: {len(metrics.captured)}, executables: {metrics.executables}"
    filled = {graphs: metrics.captured} | {title: entries for title, entries in sections.items() if entries}
    return "\n".join("\n  ".join([title, *map(str, entries)]) for title, entries in filled.items())


def _sum_up_calls(part: PartCalls) -> str:
    """The calls of a part, and the buckets with the most of them."""
    calls = sum(part.counts)
    often = sorted(part.buckets, key=lambda bucket: -bucket.calls)[:4]
    listed = ", ".join(
        f"{each.bucket}: {each.calls} x {each.padded_elements / max(each.true_elements, 1):.2f}" for each in often
    )
    mean_ms = part.seconds / max(calls, 1) * 1e3
    return f"{part.function}: {calls} of {mean_ms:.3g} ms; calls by bucket, with padded elements per true one: {listed}"


def _sum_up(hlo_text: str) -> str:
    """The collectives of a program, those of one kind together; empty if it has none."""
    found: dict[str, list[int]] = {}
    for each in list_collectives(hlo_text):
        found.setdefault(each.kind, []).extend([each.nbytes] * each.runs)
    return ", ".join(f"{len(sizes)} {kind} of {sum(sizes)} bytes" for kind, sizes in found.items())


def _nothing_captured(name: str) -> str:
    return (
        f"{name}.compile(): Dynamo leaves torch.nn's own code to Python, so that only modules of other classes within it are "
        'compiled, one by one; torch.compile(module, backend="dynaxla") compiles all of it'
    )
