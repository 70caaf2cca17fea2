"""What is said of a process, or of some calls in it: graphs and their ends, what runs in eager, parts and their programs.
`dynaxla.report` says it shortly, `dynaxla.explain` in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dynaxla.explaining.described_parts import DescribedPart, LoweredOp, describe_parts, write_bytes
from dynaxla.observe.collectives import list_collectives
from dynaxla.observe.graph_breaks import GraphBreak, breaks_without_graph, skipped_modules
from dynaxla.observe.recorder import Metrics
from dynaxla.observe.usage import CrossedBytes, PartCalls
from dynaxla.programs.miss_policy import is_compiled
from dynaxla.runtime_state import read_metrics, shared_here
from dynaxla.targets.registry import mesh_devices


@dataclass(frozen=True, slots=True)
class Account:
    """What happened.

    Attributes:
        metrics: the counters, or what some calls added to them.
        outside: graph breaks that belong to no captured graph.
        parts: the compiled parts that are alive.
        notes: further lines, by the titles of their sections.
    """

    metrics: Metrics
    outside: Sequence[GraphBreak]
    parts: Sequence[DescribedPart]
    notes: Mapping[str, Sequence[str]]

    def list_sections(self) -> dict[str, list[str]]:
        """The lines of each section by its title, equal ones once; sections without lines are left out."""
        metrics = self.metrics
        graphs = f"graphs captured: {len(metrics.captured)}, executables: {metrics.executables}"
        sections: dict[str, Sequence[object]] = {
            "breaks without a graph": self.outside,
            **self.notes,
            "results that are not eager's": metrics.divergences,
            "not verified": tuple(dict.fromkeys(metrics.unverified)),
            "ops that run in eager": tuple(dict.fromkeys(metrics.fallbacks)),
            "ops that the host computes for the device": [
                f"{op}: {count} calls, {write_crossed(metrics.host_bytes.get(op, CrossedBytes()))}"
                for op, count in metrics.host_ops.items()
            ],
            "compiled per exact shape": tuple(dict.fromkeys(metrics.exact_shapes)),
            "many programs": metrics.many_programs,
            "not compiled in a child process": metrics.unshipped,
            "captured as often as Dynamo allows": metrics.last_captures,
            "who lowers what": _each(self.parts, "lowered"),
            "masks of padding": _each(self.parts, "masked"),
            "computed once per version of the weights": _each(self.parts, "folded"),
            "inputs whose memory a program takes": _each_of_programs(self.parts, "donated"),
            "inputs that are written, and keep their memory": [
                *_each(self.parts, "kept"),
                *_each_of_programs(self.parts, "kept"),
            ],
            "memory of the programs that are loaded": _each(self.parts, "programs"),
            "stages": [
                f"{name}: {use.runs} in {use.seconds:.1f} s" for name, use in metrics.stages.items() if use.runs
            ],
            "cache": [f"{tier}: {use.hits} hits, {use.misses} misses" for tier, use in metrics.cache.items()],
            "calls": list(map(_sum_up_calls, metrics.parts)),
        }
        filled = {title: _count_equal(list(map(str, lines))) for title, lines in sections.items() if lines}
        return {graphs: list(map(str, metrics.captured)), **filled}

    def list_lowered(self) -> list[LoweredOp]:
        """Who lowers what, of all parts; ops that run in eager among it."""
        eager = map(read_fallback, dict.fromkeys(self.metrics.fallbacks))
        return [
            *(each for part in self.parts for each in part.lowered),
            *(LoweredOp(op, "eager", "", where) for op, _, where in eager),
        ]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        metrics = self.metrics
        return {
            "graphs": [asdict(capture) for capture in metrics.captured],
            "breaks_without_graph": [asdict(each) for each in self.outside],
            "programs": {"compiled": metrics.compiles, "loaded": metrics.loads, "of_weights": metrics.folds},
            "stages_s": {name: use.seconds for name, use in metrics.stages.items()},
            "eager": list(dict.fromkeys(metrics.fallbacks)),
            "host_ops": [
                {"op": op, "calls": count, **asdict(metrics.host_bytes.get(op, CrossedBytes()))}
                for op, count in metrics.host_ops.items()
            ],
            "exact_shapes": list(dict.fromkeys(metrics.exact_shapes)),
            "lowered": [asdict(each) for each in self.list_lowered()],
            "parts": [
                {n: value for n, value in asdict(part).items() if n not in ("lowered", "work")} for part in self.parts
            ],
            "calls": [asdict(part) for part in metrics.parts],
        }

    def __str__(self) -> str:
        return "\n".join("\n  ".join([title, *lines]) for title, lines in self.list_sections().items())


def report() -> str:
    """What happened since the process began, shortly: the graphs in the order of their capture, each with the line where it
    ended early and Dynamo's reason, what runs in eager, which parts have many programs, which functions Dynamo captures no
    more, the memory of the programs that are loaded, what they fold and donate, and the programs over meshes, with how their
    arguments are sharded and their collectives, with the bytes of their results on one device. `explain` says the same of one
    function in full, and what to change.

    A break without a graph is one before which nothing was captured or that lies inside of a loop: such a function, which is
    not known by its backend, runs in eager. So does a module of torch.nn that was compiled in place, but for the modules of
    other classes within it, which are captured one by one.
    """
    metrics = read_metrics()
    skipped = sorted({type(module).__name__ for module in skipped_modules() if is_compiled(module)})
    notes = {
        "compiled in place, and nothing captured": list(map(_nothing_captured, skipped)),
        "programs over meshes, and their collectives": _list_partitioned(),
    }
    parts = describe_parts(list(shared_here().parts.values()), in_full=False)
    return str(Account(metrics, breaks_without_graph(metrics.captured), parts, notes))


def read_fallback(line: str) -> tuple[str, str, str]:
    """The op, the reason and the line of the user in the text of a `FallbackReason`."""
    op, _, rest = line.partition(" runs in eager PyTorch: ")
    parts = rest.split("; ")
    where = next((part.removeprefix("at ") for part in parts if part.startswith("at ")), "")
    return op.partition(" (")[0], parts[0], where


def _count_equal(lines: Sequence[str]) -> list[str]:
    return [line if count == 1 else f"{line} ({count} times)" for line, count in Counter(lines).items()]


def _each(parts: Sequence[DescribedPart], name: str) -> list[str]:
    return [f"{part.name}: {each}" for part in parts for each in getattr(part, name)]


def _each_of_programs(parts: Sequence[DescribedPart], name: str) -> list[str]:
    """Equal lines of a part's programs stand once."""
    found = (f"{part.name}: {each}" for part in parts for p in part.programs for each in getattr(p, name))
    return list(dict.fromkeys(found))


def write_crossed(crossed: CrossedBytes) -> str:
    """What crossed, for people."""
    return f"{write_bytes(crossed.to_host)} to the host, {write_bytes(crossed.to_device)} to the device"


def _sum_up_calls(part: PartCalls) -> str:
    """The calls of a part, and the buckets with the most of them."""
    calls = sum(part.counts)
    often = sorted(part.buckets, key=lambda bucket: -bucket.calls)[:4]
    listed = ", ".join(
        f"{each.bucket}: {each.calls} x {each.padded_elements / max(each.true_elements, 1):.2f}" for each in often
    )
    mean_ms = part.seconds / max(calls, 1) * 1e3
    return f"{part.function}: {calls} of {mean_ms:.3g} ms; calls by bucket, with padded elements per true one: {listed}"


def _list_partitioned() -> list[str]:
    """The programs over meshes that are parts of a compiled graph or have collectives, and the collectives."""
    devices = mesh_devices()
    programs = [] if devices is None else list(devices.programs.items())
    return [
        f"{what}: {sums or 'no collective'}"
        for program, (what, is_part) in programs
        if (sums := _sum_up(program.hlo_text())) or is_part
    ]


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
