"""What the tests of the wall share: a failure names the function of `dynaxla.torch_api` whose ground moved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def boundary(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test one of what these names of the wall, "dynamo.forget", rely on.

    Any failure of it says which version of torch is installed, which name is concerned, and what that relies on.
    """

    def of_test(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                moved = "\n".join(f"dynaxla.torch_api.{name}: {_relies_on(name)}" for name in names)
                raise AssertionError(f"torch {torch.__version__} is not as the wall has it:\n{moved}") from error

        run.boundary = names  # type: ignore[attr-defined]
        return run

    return of_test


def _relies_on(name: str) -> str:
    module, _, attribute = name.partition(".")
    made = import_module(f"dynaxla.torch_api.{module}")
    documented = getattr(made, attribute) if callable(getattr(made, attribute)) else made
    return " ".join((documented.__doc__ or made.__doc__ or "").split())
