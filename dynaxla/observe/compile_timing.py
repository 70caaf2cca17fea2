"""Times of the stages of a compile; long compiles are logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass

LONG_S = 2.0
"""Compiles that take longer are logged."""

logger = logging.getLogger("dynaxla.compiles")  # a separate logger, so that users can silence it alone


@dataclass(slots=True)
class CapturedFunction:
    """The captured function whose graph is compiled, for the log.

    Attributes:
        what: the name of the user's function.
        capture_s: seconds of its capture by Dynamo and AOTAutograd; 0 once they are counted in a program's timing.
    """

    what: str
    capture_s: float = 0.0

    def take_capture_s(self) -> float:
        taken, self.capture_s = self.capture_s, 0.0
        return taken


@dataclass(slots=True)
class CompileTiming:
    """Seconds of one program's compile, by stage."""

    capture_s: float = 0.0
    padding_s: float = 0.0
    lowering_s: float = 0.0
    compile_s: float = 0.0

    def tell(self, what: str, why: str) -> None:
        """Logs the timing if its sum is above `LONG_S`."""
        total_s = self.capture_s + self.padding_s + self.lowering_s + self.compile_s
        if total_s > LONG_S:
            logger.warning(
                "compiled %s in %.1f s (capture %.1f, padding %.1f, lowering %.1f, XLA %.1f): %s",
                *(what, total_s, self.capture_s, self.padding_s, self.lowering_s, self.compile_s, why),
            )
