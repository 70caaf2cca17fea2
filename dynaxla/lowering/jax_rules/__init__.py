"""JAX bodies of the rows that torch-mlir does not lower (or lowers wrongly, or slowly)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch._ops import OpOverload

_MODULES = (
    "activations",
    "arithmetic",
    "attention",
    "bessel",
    "casting",
    "convolution",
    "core",
    "creation",
    "cumulative",
    "embedding",
    "fft",
    "fractional_pooling",
    "indexing",
    "linalg",
    "logic",
    "losses",
    "matrix",
    "normalization",
    "ordering",
    "polynomials",
    "pooling",
    "random",
    "recurrent",
    "reductions",
    "resampling",
    "scattering",
    "transcendental",
    "views",
)


@cache
def all_rules() -> Mapping[OpOverload, Callable[..., Any]]:
    """Every rule, by overload; imports JAX.

    Raises:
        ValueError: two modules hold a rule for one overload.
    """
    rules: dict[OpOverload, Callable[..., Any]] = {}
    for name in _MODULES:
        found = import_module(f"{__name__}.{name}").RULES
        if twice := rules.keys() & found.keys():
            raise ValueError(f"two modules hold rules for {sorted(map(str, twice))}")
        rules.update(found)
    return MappingProxyType(rules)
