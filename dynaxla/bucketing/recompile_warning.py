"""Warns once that a part has many programs: how many, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from dynaxla.bucketing.shape_keys import EXACT, ShapeKey
from dynaxla.diagnostics import ExactShape, ManyPrograms
from dynaxla.options import Options

EXPECTED = 8
"""Number of programs of a part, for one reason, above which the user is warned."""

_FEWER = "Give these sizes fewer buckets (options buckets, dynaxla.mark_bucketed)"


class RecompileWarnings:
    """Warnings about the number of a part's programs: exact shapes, buckets, evictions; each is issued once.

    Args:
        options: the user's options.
        chosen: whether the user chose the buckets; then their number needs no warning.

    Attributes:
        refused: why the part is compiled per exact shape; None if it is padded, or if the options ask for exact shapes.
    """

    def __init__(self, options: Options, chosen: bool) -> None:
        self._options = options
        self._chosen = chosen
        self._said: set[str] = set()
        self.refused: ExactShape | None = None

    def notices(
        self, keys: Collection[ShapeKey], describe: Callable[[Sequence[ShapeKey]], str]
    ) -> Iterator[ManyPrograms]:
        """Yields the warnings that are due and were not issued yet.

        Args:
            keys: the shape keys of the part's programs.
            describe: makes a sentence of the sizes that vary among keys.
        """
        exact = [key for key in keys if key[:1] == (EXACT,)]
        padded = [key for key in keys if key[:1] != (EXACT,)]
        most = self._options.max_executables
        if len(exact) > EXPECTED and self._is_new("exact"):
            yield ManyPrograms(len(exact), self._why_exact(), describe(exact), self._instead())
        if len(padded) > EXPECTED and not self._chosen and self._is_new("buckets"):
            yield ManyPrograms(len(padded), "one for each bucket of its sizes", describe(padded), _FEWER)
        if len(keys) > most and self._is_new("evicted"):
            reason = f"more than the {most} that max_executables keeps, so it will compile again and again"
            yield ManyPrograms(len(keys), reason, describe(list(keys)), f"{_FEWER}, or keep more")

    def _is_new(self, what: str) -> bool:
        if what in self._said:
            return False
        self._said.add(what)
        return True

    def _why_exact(self) -> str:
        return "one for each shape, as the options want it" if self.refused is None else str(self.refused)

    def _instead(self) -> str:
        if self.refused is None:
            return "Leave out options bucketing and Exact() for one program per bucket"
        return "Write that line with ops that have a pad rule (docs/bucketing.md), or pad its sizes before the call"
