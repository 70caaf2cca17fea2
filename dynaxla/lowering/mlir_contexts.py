"""Shared MLIR contexts: making one takes as long as importing or lowering a call of one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_MODULES = 256
"""Number of modules that share a context. A context keeps their types and attributes as long as it lives."""


class SharedContext:
    """A context that is replaced after `MOST_MODULES` modules. Not safe from several threads at once.

    Args:
        make: makes a context.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._context: Any = None
        self._left = 0

    def next_context(self) -> Any:
        """The context for the next module."""
        if not self._left:
            self._context, self._left = self._make(), MOST_MODULES
        self._left -= 1
        return self._context
