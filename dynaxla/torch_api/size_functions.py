"""The functions in expressions of sizes, from torch and sympy; upper bounds and Python code of such expressions.

Relies on torch.utils._sympy, whose functions define how sizes round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch.utils._sympy.functions import (
    CeilDiv,
    CeilToInt,
    FloatPow,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    OpaqueUnaryFn_log2,
    OpaqueUnaryFn_sqrt,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
)
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = [
    "BITWISE",
    "CeilDiv",
    "CeilToInt",
    "FloatPow",
    "FloatTrueDiv",
    "FloorDiv",
    "FloorToInt",
    "IntTrueDiv",
    "Max",
    "Min",
    "Mod",
    "OpaqueUnaryFn_log2",
    "OpaqueUnaryFn_sqrt",
    "PythonMod",
    "RoundToInt",
    "ToFloat",
    "TruncToInt",
    "as_python",
    "is_printable",
    "upper_bound",
]

BITWISE = ("BitwiseFn_bitwise_and", "BitwiseFn_bitwise_or", "BitwiseFn_bitwise_xor")
"""Names of the functions that print themselves."""


def as_python(expression: sympy.Expr) -> str:
    """Returns Python code of an expression, which may use `math` and `torch`. Relies on `PythonPrinter`."""
    return PythonPrinter().doprint(expression)  # type: ignore[no-any-return]


def is_printable(expression: sympy.Expr) -> bool:
    """Whether `as_python` supports all functions in an expression. Relies on `PythonPrinter`'s methods, one for each
    function."""
    names = {type(call).__name__ for call in expression.atoms(sympy.Function)}
    return all(name in BITWISE or hasattr(PythonPrinter, f"_print_{name}") for name in names)


def upper_bound(expression: sympy.Expr, ranges: Mapping[sympy.Symbol, tuple[int, int]]) -> int | None:
    """Returns an upper bound of an expression for symbols within these inclusive ranges; None if it is unbounded.

    Relies on `bound_sympy`, which combines the bounds of each operation.
    """
    upper: Any = bound_sympy(expression, {symbol: ValueRanges(*ends) for symbol, ends in ranges.items()}).upper
    return int(upper) if upper.is_Integer else None
