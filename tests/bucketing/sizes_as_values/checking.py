"""Runs expressions of the tables by padded programs and by eager, and says which differ and which are not padded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch.compiler import set_stance
from torch.fx import Node

import dynaxla
from dynaxla.bucketing.padded_graph import CannotPad, GraphPadder
from dynaxla.observe.recorder import Metrics
from tests.bucketing.differences import difference, results
from tests.bucketing.eager_programs import eager_programs
from tests.bucketing.poison import is_fault
from tests.bucketing.sizes_as_values.expression import SIZES, Family

Kind = Literal["wrong", "failed", "exact", "eager", "captured"]
Dynamic = bool | None
LAST = 2
"""At so many sizes, the last ones, Dynamo captures nothing: what runs there is a symbolic graph."""


@dataclass(frozen=True)
class Finding:
    """What was found of one expression.

    Attributes:
        kind: "wrong" numbers; "failed" for an exception or a pad rule that raised; "exact" where shapes are exact, for a
            reason; "eager" where an op runs in eager; "captured" where Dynamo captures a graph for every size.
        detail: where numbers differ, or the op and the reason.
    """

    family: str
    text: str
    kind: Kind
    detail: str


def examine(family: Family, texts: Sequence[str], dynamic: Dynamic) -> list[Finding]:
    """What there is to say of these expressions, which are compiled together; one that is not padded is then left out."""
    found: list[Finding] = []
    rest = list(texts)
    while rest:
        before = dynaxla.read_metrics()
        try:
            with collected_reasons() as lines:
                wrong = list(_differences(family, rest, dynamic))
            exact = _not_padded(family, rest, lines, before)
        except Exception as error:
            if len(rest) == 1:
                return [*found, _raised(family, rest[0], error)]
            half = len(rest) // 2  # whose it is shows when fewer run together
            return [*found, *examine(family, rest[:half], dynamic), *examine(family, rest[half:], dynamic)]
        left_out = {finding.text for finding in (*wrong, *exact)}
        found += [*wrong, *exact]
        if not left_out:
            return found
        rest = [text for text in rest if text not in left_out]
    return found


def is_exact(family: Family, text: str, dynamic: Dynamic) -> bool:
    """Whether the expression is not padded at one of the sizes; stops at the first of which it is so."""
    before = dynaxla.read_metrics()
    torch._dynamo.reset()
    with collected_reasons() as lines, eager_programs():
        compiled = torch.compile(family.function(text), backend="dynaxla", dynamic=dynamic)
        sizes = valid_sizes(family, text)
        for number, (s, t) in enumerate(sizes):
            try:
                with set_stance("default" if number < len(sizes) - LAST else "fail_on_recompile"):
                    results(compiled, family.make(s, t))
            except RuntimeError as error:
                return _raised(family, text, error).kind == "captured"
            after = dynaxla.read_metrics()
            if lines or after.fallbacks != before.fallbacks or after.exact_shapes != before.exact_shapes:
                return True
    return False


def valid_sizes(family: Family, text: str) -> tuple[tuple[int, int], ...]:
    """All sizes, or all but those of one element, where eager raises at these."""
    function = family.function(text)
    try:
        for s, t in SIZES:
            if s == 1:
                function(*family.make(s, t))
    except (RuntimeError, ValueError, IndexError):
        return tuple(sizes for sizes in SIZES if sizes[0] != 1)
    return SIZES


def groups(family: Family, texts: Iterable[str], most: int) -> Iterator[list[str]]:
    """Expressions that run at the same sizes, so many together."""
    by_sizes: dict[Any, list[str]] = {}
    for text in texts:
        by_sizes.setdefault(valid_sizes(family, text), []).append(text)
    for alike in by_sizes.values():
        for start in range(0, len(alike), most):
            yield alike[start : start + most]


class _Mixed(Exception):
    """Something is to be said of one of several expressions."""


def _differences(family: Family, texts: Sequence[str], dynamic: Dynamic) -> Iterator[Finding]:
    torch._dynamo.reset()
    function = family.function(*texts)
    told: set[str] = set()
    with eager_programs():
        compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
        sizes = valid_sizes(family, texts[0])
        for number, (s, t) in enumerate(sizes):
            mine, eager = family.make(s, t), family.make(s, t)
            expected, wanted = results(function, eager)
            with set_stance("default" if number < len(sizes) - LAST else "fail_on_recompile"):
                actual, got = results(compiled, mine)
            where = f"at s={s}, t={t}, dynamic={dynamic}"
            for text, result, right in zip(texts, actual, expected, strict=True):
                unlike = difference(result, right)
                if unlike and text not in told:
                    told.add(text)
                    yield _finding(family, text, "wrong", f"{where}: {unlike}")
            if told:
                continue
            for name, result, right in zip([*family.inputs] * 2, [*got, *mine], [*wanted, *eager], strict=True):
                unlike = difference(result, right)
                if unlike and len(texts) > 1:
                    raise _Mixed(unlike)
                if unlike:
                    told.add(texts[0])
                    yield _finding(family, texts[0], "wrong", f"{where}: of {name}: {unlike}")


class _Collector:
    """All reasons why a graph is not padded, where the backend stops at the first."""

    def __init__(self) -> None:
        self._first: dict[int, CannotPad] = {}
        self.lines: list[str] = []

    def wrap(self, rewritten: Callable[..., Any]) -> Callable[..., Any]:
        def collect(padder: Any, node: Node, rewrite: Any) -> Any:
            if node.op == "output" and id(padder) in self._first:
                raise self._first.pop(id(padder))
            if any(padder._values.get(operand) is self for operand in node.all_input_nodes):
                return self
            try:
                return rewritten(padder, node, rewrite)
            except CannotPad as error:
                self._first.setdefault(id(padder), error)
                self.lines.append(str(error.reason))
                return self  # what reads this node is not asked

        return collect


@contextmanager
def collected_reasons() -> Iterator[list[str]]:
    """Lines of all reasons inside why graphs are not padded."""
    collector = _Collector()
    with mock.patch.object(GraphPadder, "_rewritten", collector.wrap(GraphPadder._rewritten)):
        yield collector.lines


def _not_padded(family: Family, texts: Sequence[str], reasons: Sequence[str], before: Metrics) -> list[Finding]:
    """The expressions that are not padded, by the names of their functions in the lines that the backend wrote."""
    after = dynaxla.read_metrics()
    lines: list[tuple[Kind, str]] = [
        *(("eager", line) for line in after.fallbacks[len(before.fallbacks) :]),
        *(("exact", line) for line in reasons),
        *(("exact", line) for line in after.exact_shapes[len(before.exact_shapes) :]),
    ]
    found: dict[str, Finding] = {}
    for kind, line in lines:
        place = re.search(r" in e(\d+)\b", line)
        if place is None and len(texts) > 1:
            continue  # what the backend says of a gradient names no line
        text = texts[int(place[1])] if place else texts[0]
        if is_fault(line):
            kind = "failed"
        if text not in found or (kind == "failed" and found[text].kind != "failed"):
            found[text] = _finding(family, text, kind, line.split("; at ")[0])
    if lines and not found:
        raise _Mixed(lines[0][1])
    return list(found.values())


def _raised(family: Family, text: str, error: Exception) -> Finding:
    if "fail_on_recompile" in str(error):
        return _finding(family, text, "captured", "Dynamo captures it anew for every size")
    return _finding(family, text, "failed", f"{type(error).__name__}: {error}")


def _finding(family: Family, text: str, kind: Kind, detail: str) -> Finding:
    return Finding(family.name, text, kind, " ".join(detail.split()))
