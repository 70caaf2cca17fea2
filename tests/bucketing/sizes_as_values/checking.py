"""Runs expressions of the tables by padded programs and by eager, and says which differ and which are not padded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import dynaxla
from dynaxla.metrics.recorder import Metrics
from tests.bucketing.eager_programs import eager_programs
from tests.bucketing.sizes_as_values.expression import SIZES, Family
from tests.tolerances import assert_close

Kind = Literal["wrong", "failed", "exact", "eager"]
Dynamic = bool | None
RULE_FAILED = "its pad rule failed"


@dataclass(frozen=True)
class Finding:
    """What was found of one expression.

    Attributes:
        kind: "wrong" numbers; "failed" for an exception or a pad rule that raised; "exact" where shapes are exact, for a
            reason; "eager" where an op runs in eager.
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
            wrong = list(_differences(family, rest, dynamic))
        except Exception as error:  # whose it is shows when half of them run alone
            if len(rest) == 1:
                return [*found, _finding(family, rest[0], "failed", f"{type(error).__name__}: {error}")]
            half = len(rest) // 2
            return [*found, *examine(family, rest[:half], dynamic), *examine(family, rest[half:], dynamic)]
        found += wrong
        refused = _refused(family, rest, before, dynaxla.read_metrics())
        found += refused
        left_out = {finding.text for finding in refused}
        if not left_out:
            return found
        rest = [text for text in rest if text not in left_out]
    return found


def valid_sizes(family: Family, text: str) -> tuple[tuple[int, int], ...]:
    """All sizes, or all but those of one element, where eager refuses these."""
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


def _differences(family: Family, texts: Sequence[str], dynamic: Dynamic) -> Iterator[Finding]:
    torch._dynamo.reset()
    function = family.function(*texts)
    told: set[str] = set()
    with eager_programs():
        compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
        for s, t in valid_sizes(family, texts[0]):
            mine, eager = family.make(s, t), family.make(s, t)
            expected = _results(function, eager, len(texts))
            actual = _results(compiled, mine, len(texts))
            for text, got, wanted in zip(texts, actual, expected, strict=True):
                difference = _difference(got, wanted)
                if difference and text not in told:
                    told.add(text)
                    yield _finding(family, text, "wrong", f"at s={s}, t={t}, dynamic={dynamic}: {difference}")
            for name, got, wanted in zip(family.inputs, mine, eager, strict=True):
                difference = _difference([got.detach()], [wanted.detach()])
                if difference:
                    yield _finding(family, "; ".join(texts), "wrong", f"{name} at s={s}, t={t}: {difference}")


def _results(function: Any, args: Sequence[Tensor], count: int) -> list[list[Tensor | None]]:
    """For each expression its result and the inputs' gradients."""
    wanted = [arg for arg in args if arg.requires_grad]
    results = []
    made = function(*args)
    for number, result in enumerate(made):
        grads: tuple[Tensor | None, ...] = ()
        if isinstance(result, Tensor) and result.requires_grad:
            torch.manual_seed(number)
            cotangent = torch.randn(result.shape, dtype=result.dtype)
            grads = torch.autograd.grad(result, wanted, cotangent, allow_unused=True, retain_graph=True)
        results.append([result.detach(), *grads])
    return results


def _difference(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> str:
    for place, (mine, eager) in enumerate(zip(actual, expected, strict=True)):
        what = f"gradient {place}: " if place else ""
        if mine is None and eager is not None and not eager.any():
            continue
        if mine is None or eager is None:
            if mine is not None and not mine.any():
                continue
            if mine is not eager:
                return f"{what}{mine}, expected {eager}"
            continue
        try:
            assert_close(mine, eager)
        except AssertionError as error:
            return what + str(error)
    return ""


def _refused(family: Family, texts: Sequence[str], before: Metrics, after: Metrics) -> list[Finding]:
    """The expressions that are not padded, by the names of their functions in the lines that the backend wrote."""
    found: dict[str, Finding] = {}
    for kind, lines in (
        ("eager", after.fallbacks[len(before.fallbacks) :]),
        ("exact", after.exact_shapes[len(before.exact_shapes) :]),
    ):
        for line in lines:
            place = re.search(r" in e(\d+)\b", line)
            text = texts[int(place[1])] if place else texts[0]
            said: Kind = "failed" if RULE_FAILED in line else kind  # type: ignore[assignment]
            if text not in found or said == "failed":
                found[text] = _finding(family, text, said, line.split("; at ")[0])
    return list(found.values())


def _finding(family: Family, text: str, kind: Kind, detail: str) -> Finding:
    return Finding(family.name, text, kind, " ".join(detail.split()))
