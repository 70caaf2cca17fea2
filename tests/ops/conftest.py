"""How the bodies of ops are compiled when they are compared alone, without the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops import rule_check


@pytest.fixture(autouse=True, scope="session")
def _machine_code_is_plain(full: bool) -> Iterator[None]:
    """In the quick list LLVM optimizes no bodies that run alone: that is half their time. Programs of the package it does."""
    with pytest.MonkeyPatch.context() as patch:
        if not full:
            patch.setattr(rule_check, "COMPILER_OPTIONS", {"xla_backend_optimization_level": 0})
        yield
