"""A decorator of another module than what it decorates: `functools.wraps` gives the wrapper a name and a module not its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

OFFSET = 1.0


def scaled(factor: float) -> Callable[[Callable[..., Tensor]], Any]:
    def wrap(function: Callable[..., Tensor]) -> Any:
        @functools.wraps(function)
        def run(x: Tensor, *, weight: float = 0.5) -> Tensor:
            return function(x) * factor * weight + OFFSET

        return run

    return wrap
