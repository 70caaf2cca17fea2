"""Which cases of a parametrization are in the quick list of tests: CONTRIBUTING.md says how to decide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *named: Any) -> list[Any]:
    """The cases, of which all but those that are named are marked long; a tuple holds the values of several parameters.

    Raises:
        ValueError: a case is named that is not there.
    """
    cases = list(cases)
    if missing := [name for name in named if name not in cases]:
        raise ValueError(f"no such cases: {missing}")
    return [case if case in named else _long(case) for case in cases]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
