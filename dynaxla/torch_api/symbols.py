"""Symbolic sizes: their expressions, what they were in the call that is captured, and what guards say of them.

Relies on `SymInt.node` (a SymNode) with `expr`, `hint` and `shape_env`, which SymFloat and SymBool have too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_symbols, is_nested_int

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
_KINDS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def expression(value: Any) -> Any:
    """The sympy expression of a symbolic number; any other value as it is. Relies on `SymNode.expr`."""
    return value.node.expr if isinstance(value, _KINDS) else value


def example(value: Any) -> Any:
    """What a symbolic number was in the call that is captured; any other value as it is. Relies on `SymNode.hint`.

    None where that is known only when the graph runs (the size of what `nonzero` gives).
    """
    return value.node.hint if isinstance(value, _KINDS) else value


def example_of(symbol: sympy.Symbol, value: Symbolic) -> int:
    """What a symbol of the value's graph was in the call that is captured. Relies on `ShapeEnv.backed_var_to_val`."""
    return int(value.node.shape_env.backed_var_to_val[symbol])


def is_ragged(value: Any) -> bool:
    """Whether a size is that of a jagged nested tensor, which is no number. Relies on `is_nested_int` of its hint."""
    return isinstance(value, torch.SymInt) and is_nested_int(value.node.hint)


def varies(value: Any) -> bool:
    """Whether anything of a tensor's shape, strides or offset, or a number, is symbolic. Relies on `free_symbols`."""
    return bool(free_symbols(value))


def only_value(size: torch.SymInt) -> int | None:
    """The size where it is the same at all sizes that the graph is guarded for: s0 // 8, for s0 from 8 to 15.

    Relies on `ShapeEnv.bound_sympy`.
    """
    if isinstance(size.node.expr, sympy.Symbol):
        return None
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return int(bounds.lower) if bounds.is_singleton() else None


def guarded_values(value: Symbolic) -> dict[sympy.Expr, sympy.Integer]:
    """Expressions that are one number at all sizes that the graph is guarded for: s // (s // 4), where 4 divides s.

    Relies on `ShapeEnv.guards`, each with its `expr`. All sizes of a graph have one environment.
    """
    equal = [guard.expr for guard in value.node.shape_env.guards if isinstance(guard.expr, sympy.Eq)]
    return {eq.lhs: eq.rhs for eq in equal if eq.rhs.is_Integer and not eq.lhs.is_Symbol}


def replacing(value: Symbolic) -> Callable[[sympy.Expr], sympy.Expr]:
    """What writes an expression with the symbols that guards have left. Relies on `ShapeEnv.replace`."""
    return value.node.shape_env.replace  # type: ignore[no-any-return]


def upper_bound(symbol: sympy.Symbol, value: Symbolic) -> int | None:
    """The declared or guarded maximum of a symbol of the value's graph, where there is one.

    Relies on `ShapeEnv.var_to_range`, whose `upper` is infinite where nothing is known.
    """
    ranges = value.node.shape_env.var_to_range
    upper = ranges[symbol].upper if symbol in ranges else None
    return int(upper) if upper is not None and getattr(upper, "is_Integer", isinstance(upper, int)) else None


def guards(value: Symbolic) -> list[sympy.Expr]:
    """What the sizes of the value's graph must fulfil for the graph to hold, beside being 2 or more.

    Relies on `ShapeEnv.guards`, each with its `expr`.
    """
    return [guard.expr for guard in value.node.shape_env.guards]


def known_of_sizes(value: Symbolic) -> Iterator[list[str]]:
    """What was found of the symbols of the value's graph: their ranges, what they were replaced by, and the guards.

    Relies on `ShapeEnv.var_to_range`, `ShapeEnv.replacements` and `ShapeEnv.guards`.
    """
    env = value.node.shape_env
    yield [f"{symbol} in {its.lower}, {its.upper}" for symbol, its in env.var_to_range.items()]
    yield [f"{symbol} is {its}" for symbol, its in env.replacements.items()]
    yield [str(guard.expr) for guard in env.guards]
