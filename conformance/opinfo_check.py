"""Runs one op of torch's OpInfo database, sample by sample, through torch.compile(backend="dynaxla") and in eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves, tree_map

import dynaxla
from conformance.opinfo_compare import UNINITIALIZED, difference, first_line
from conformance.opinfo_samples import Sample, leaves_of_all, name_of, run, seed, take_samples
from conformance.sweep_record import Record, Status
from dynaxla import pipeline

RANDOM = "random: the numbers were compared where eager draws them, shape, dtype and finiteness where XLA does"
_FALLBACK = re.compile(r"(?P<op>.+?)(?: \([^)]*\))? runs in eager PyTorch: (?P<reason>\w+)")


def check(info: Any, dtype: torch.dtype, direction: str, count: int, device: str = "cpu") -> Record:
    """Compiles and compares up to `count` samples of one of torch's own devices."""
    key = (name_of(info), str(dtype).removeprefix("torch."), direction)
    seed()
    # OpInfo seeds random ops inside of the op, which no graph can hold.
    with patch.object(common_methods_invocations, "wrapper_set_seed", _call):
        taken = take_samples(info, dtype, direction == "backward", device)
        return _check(info, dtype, list(islice(taken, count)), key)


def _call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _check(info: Any, dtype: torch.dtype, samples: list[Sample], key: tuple[str, str, str]) -> Record:
    if not samples:
        return Record(*key, Status.NOT_RUN.value, detail="eager takes none of the samples")
    found = _check_together(info, dtype, samples)
    if found is None or found.problem is not None:
        each = _check_each(info, dtype, samples)
        found = each if found is None or each.problem is not None else found
    problem = found.problem or _problem_with_eager_numbers(info, samples)
    status, detail = problem or (Status.CORRECT, _uncompared(info, samples))
    return Record(*key, status.value, len(samples), tuple(sorted(found.compiled)), tuple(sorted(found.eager)), detail)


@dataclass
class Found:
    """What compiling samples brought up: overloads that were compiled, parts that ran in eager, the worst problem."""

    compiled: set[str] = field(default_factory=set)
    eager: set[str] = field(default_factory=set)
    problem: tuple[Status, str] | None = None

    @contextmanager
    def watch(self, dtype: torch.dtype) -> Iterator[None]:
        """Adds what is compiled, and what runs in eager, within the block."""
        noting = _noting(self.compiled, dtype, pipeline.call_graph)
        with patch.object(pipeline, "call_graph", noting), _eager_parts(self.eager):
            yield


def _check_together(info: Any, dtype: torch.dtype, samples: Sequence[Sample]) -> Found | None:
    """All samples in one graph, which takes a fraction of the time; None if Dynamo does not make one graph of them."""
    found = Found()
    torch._dynamo.reset()
    op = info.op

    def call_op(calls: Sequence[Any]) -> list[Any]:
        return [op(first, *args, **kwargs) for first, args, kwargs in calls]

    calls = [(sample.call.input, sample.call.args, sample.call.kwargs) for sample in samples]
    with found.watch(dtype):
        found.problem = _problem_together(info, torch.compile(call_op, backend="dynaxla"), samples, calls)
    if any(token.endswith((":graph_break", ":no_graph")) for token in found.eager):
        return None
    # Samples that share an input are not what they are alone, in eager neither.
    return None if found.problem and _problem_together(info, call_op, samples, calls) else found


def _problem_together(
    info: Any, function: Callable[..., Any], samples: Sequence[Sample], calls: Sequence[Any]
) -> tuple[Status, str] | None:
    seed()
    try:
        leaves = leaves_of_all(samples, function(calls))
    except Exception as error:  # the sweep's result
        return Status.RAISED, f"samples in one graph: {type(error).__name__}: {first_line(error)}"
    differences = [difference(info, *pair) for pair in zip(samples, leaves, strict=True)]
    told = next(filter(None, differences), None)
    return told and (Status.WRONG, f"samples in one graph: {told}")


def _check_each(info: Any, dtype: torch.dtype, samples: Sequence[Sample]) -> Found:
    found = Found()
    for sample in samples:
        with found.watch(dtype):
            problem = _problem(info, sample)
        if found.problem is None or (problem is not None and problem[0] is Status.WRONG):
            found.problem = problem or found.problem
    return found


def _problem_with_eager_numbers(info: Any, samples: Sequence[Sample]) -> tuple[Status, str] | None:
    """What is wrong where a random op draws the numbers that eager does."""
    drawn = [_problem(info, sample, rng="eager") for sample in samples if sample.is_random]
    return next(filter(None, drawn), None)


def _problem(info: Any, sample: Sample, **options: str) -> tuple[Status, str] | None:
    torch._dynamo.reset()
    op = info.op

    def call_op(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    seed()
    try:
        leaves = run(torch.compile(call_op, backend="dynaxla", options=options), sample)
    except Exception as error:  # the sweep's result
        return Status.RAISED, f"{type(error).__name__}: {first_line(error)} | {_described(sample)}"
    told = difference(info, sample, leaves, same_numbers=options.get("rng") == "eager")
    return None if told is None else (Status.WRONG, f"{told} | {_described(sample)}")


def _noting(found: set[str], dtype: torch.dtype, call_graph: Callable[..., Any]) -> Callable[..., Any]:
    """`call_graph` that adds the overloads with tensors of `dtype` to what was found."""

    def noting(graph: torch.fx.Graph) -> Any:
        for node in graph.nodes:
            values = tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
            if isinstance(node.target, OpOverload) and any(getattr(v, "dtype", None) == dtype for v in values):
                found.add(str(node.target))
        return call_graph(graph)

    return noting


@contextmanager
def _eager_parts(found: set[str]) -> Iterator[None]:
    """Adds what ran in eager within the block, by the backend's fallbacks and by Dynamo's graph breaks."""
    counters["graph_break"].clear()
    before = dynaxla.read_metrics()
    yield
    after = dynaxla.read_metrics()
    tokens = {_fallback(line) for line in after.fallbacks[len(before.fallbacks) :]}
    tokens |= {_graph_break(text) for text in counters["graph_break"]}
    if after.graphs == before.graphs:
        tokens = tokens or {"capture:no_graph"}
    found |= tokens


def _fallback(line: str) -> str:
    matched = _FALLBACK.match(line)
    return f"{matched['op'].replace(' ', '-')}:{matched['reason']}" if matched else "unknown:unknown"


def _graph_break(text: str) -> str:
    """The op that Dynamo names, or else its words."""
    named = re.search(r"Developer debug context: (aten\.\S+)", text)
    return f"{named[1] if named else text.splitlines()[0].replace(' ', '-')}:graph_break"


def _uncompared(info: Any, samples: Sequence[Sample]) -> str:
    if info.name in UNINITIALIZED:
        return "memory that is not initialized: only shape and dtype were compared"
    return RANDOM if any(s.is_random for s in samples) else ""


def _described(sample: Sample) -> str:
    def short(value: Any) -> Any:
        return list(value.shape) if isinstance(value, torch.Tensor) else value

    call = sample.call
    return str(tree_map(short, (call.input, tuple(call.args), dict(call.kwargs))))[:160]
