"""Says once of a part that it has many programs, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dynaxla.bucketing.shape_keys import EXACT, Key
from dynaxla.diagnostics import ExactShape, ManyPrograms
from dynaxla.options import Options

EXPECTED = 8
"""So many programs of a part, for one reason, are nothing to speak of."""

_FEWER = "Give these sizes fewer buckets (options buckets, dynaxla.mark_bucketed)"


class Crowd:
    """What there is to say of the number of one part's programs; each of three things is said once.

    Args:
        options: the user's.
        chosen: whether the user said which buckets there are: their number is no news then.

    Attributes:
        refused: why the part is compiled per exact shape; None where it is not, or where the options want it.
    """

    def __init__(self, options: Options, chosen: bool) -> None:
        self._options = options
        self._chosen = chosen
        self._said: set[str] = set()
        self.refused: ExactShape | None = None

    def notices(self, keys: Sequence[Key], describe: Callable[[Sequence[Key]], str]) -> Iterator[ManyPrograms]:
        """What is new to say.

        Args:
            keys: of the part's programs.
            describe: which sizes vary among keys, as a sentence.
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
            yield ManyPrograms(len(keys), reason, describe(keys), f"{_FEWER}, or keep more")

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
