"""What became of a process's functions, as text."""

from __future__ import annotations

from collections.abc import Sequence

from dynaxla.breaks import breaks_without_graph, skipped_modules
from dynaxla.freezing import is_compiled
from dynaxla.process import read_metrics


def report() -> str:
    """The graphs in the order of their capture, each with the line where it ended early and Dynamo's reason, what runs in
    eager, which parts have many programs, and which functions Dynamo captures no more, since the process began.

    A break without a graph is one before which nothing was captured or that lies inside of a loop: such a function, which is
    not known by its backend, runs in eager. So does a module of torch.nn that was compiled in place, but for the modules of
    other classes within it, which are captured one by one.
    """
    metrics = read_metrics()
    sections: dict[str, Sequence[object]] = {
        "breaks without a graph": breaks_without_graph(metrics.captured),
        "compiled in place, and nothing captured": _nothing_captured(),
        "ops that run in eager": tuple(dict.fromkeys(metrics.fallbacks)),
        "compiled per exact shape": tuple(dict.fromkeys(metrics.exact_shapes)),
        "many programs": metrics.many_programs,
        "captured as often as Dynamo allows": metrics.last_captures,
    }
    graphs = f"graphs captured: {len(metrics.captured)}, executables: {metrics.compiles}"
    filled = {graphs: metrics.captured} | {title: entries for title, entries in sections.items() if entries}
    return "\n".join("\n  ".join([title, *map(str, entries)]) for title, entries in filled.items())


def _nothing_captured() -> list[str]:
    names = {type(module).__name__ for module in skipped_modules() if is_compiled(module)}
    return [
        f"{name}.compile(): Dynamo leaves torch.nn's own code to Python, so that only modules of other classes within it are "
        'compiled, one by one; torch.compile(module, backend="dynaxla") compiles all of it'
        for name in sorted(names)
    ]
