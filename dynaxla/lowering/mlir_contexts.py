"""Contexts of MLIR, which take as long to make as a call of one op takes to be imported or lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_MODULES = 256
"""So many modules share a context, which keeps their types and attributes for as long as it lives."""


class SharedContext:
    """A context that is made anew for every `MOST_MODULES`-th module. Not for several threads at once.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._context: Any = None
        self._left = 0

    def for_module(self) -> Any:
        """The context for one more module."""
        if not self._left:
            self._context, self._left = self._make(), MOST_MODULES
        self._left -= 1
        return self._context
