"""Seconds that a call waits for a compile, logged where they are many."""

from __future__ import annotations

import logging
from dataclasses import dataclass

LONG_S = 2.0
"""A compile that takes more is logged."""

logger = logging.getLogger("dynaxla.compiles")  # of its own, so that it can be silenced alone


@dataclass(slots=True)
class Origin:
    """The graph that programs are compiled of.

    Attributes:
        what: the user's function, for the log.
        capture_s: seconds that Dynamo and AOTAutograd took for it, until a program has counted them as its own.
    """

    what: str
    capture_s: float = 0.0

    def take_capture_s(self) -> float:
        taken, self.capture_s = self.capture_s, 0.0
        return taken


@dataclass(slots=True)
class Spent:
    """Seconds that one program took, by stage."""

    capture_s: float = 0.0
    padding_s: float = 0.0
    lowering_s: float = 0.0
    compile_s: float = 0.0

    def tell(self, what: str, why: str) -> None:
        """Writes a line on the log if they are more than `LONG_S`."""
        total_s = self.capture_s + self.padding_s + self.lowering_s + self.compile_s
        if total_s > LONG_S:
            logger.warning(
                "compiled %s in %.1f s (capture %.1f, padding %.1f, lowering %.1f, XLA %.1f): %s",
                *(what, total_s, self.capture_s, self.padding_s, self.lowering_s, self.compile_s, why),
            )
