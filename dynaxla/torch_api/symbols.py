"""Symbolic sizes: their expressions, their values in the call being captured, their guards, ranges and checks.

Relies on `SymInt.node` (a SymNode) with `expr`, `hint` and `shape_env`, which SymFloat and SymBool have too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols, is_nested_int
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

from dynaxla.torch_api.pytree import tree_leaves

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
_SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


def expression(value: Any) -> Any:
    """Returns the sympy expression of a symbolic number; any other value unchanged. Relies on `SymNode.expr`."""
    return value.node.expr if isinstance(value, _SYMBOLIC_TYPES) else value


def example(value: Any) -> Any:
    """Returns the value of a symbolic number in the call being captured; any other value unchanged. Relies on `SymNode.hint`.

    None if the value is known only when the graph runs (the result size of `nonzero`).
    """
    return value.node.hint if isinstance(value, _SYMBOLIC_TYPES) else value


def example_of(symbol: sympy.Symbol, value: Symbolic) -> int:
    """Returns the value of a symbol in the call being captured; `value` is any symbolic number of the graph. Relies on
    `ShapeEnv.backed_var_to_val`."""
    return int(value.node.shape_env.backed_var_to_val[symbol])


def is_ragged(value: Any) -> bool:
    """Whether a size is the ragged size of a jagged nested tensor, which is no number. Relies on `is_nested_int` of its
    hint."""
    return isinstance(value, torch.SymInt) and is_nested_int(value.node.hint)


def varies(value: Any) -> bool:
    """Whether a number, or a tensor's shape, strides or offset, is symbolic. Relies on `free_symbols`."""
    return bool(free_symbols(value))


def is_read_value(value: Any) -> bool:
    """Whether a symbolic number is a float or a truth value that follows from one that was read out of a tensor, by `x.item()`,
    and not from sizes alone. Relies on `free_symbols` and `free_unbacked_symbols`; symbols of sizes are integers."""
    if isinstance(value, torch.SymBool):
        return bool(free_unbacked_symbols(value))
    return isinstance(value, torch.SymFloat) and not all(symbol.is_integer for symbol in free_symbols(value))


def get_constant_value(size: torch.SymInt) -> int | None:
    """Returns the value of a size that the graph's guards fix, else None: s0 // 8, for s0 from 8 to 15.

    Relies on `ShapeEnv.bound_sympy`.
    """
    if isinstance(size.node.expr, sympy.Symbol):
        return None
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return int(bounds.lower) if bounds.is_singleton() else None


def is_at_least(number: torch.SymInt, least: int) -> bool:
    """Whether a number is this or more for all sizes of the graph. Relies on `ShapeEnv.bound_sympy`."""
    return bool(number.node.shape_env.bound_sympy(number.node.expr).lower >= least)


def guarded_values(value: Symbolic) -> dict[sympy.Expr, sympy.Integer]:
    """Returns the expressions that guards fix to one number, with that number: s // (s // 4), where 4 divides s.

    Relies on `ShapeEnv.guards`, each with its `expr`. All sizes of a graph share one environment.
    """
    equal = [guard.expr for guard in value.node.shape_env.guards if isinstance(guard.expr, sympy.Eq)]
    return {eq.lhs: eq.rhs for eq in equal if eq.rhs.is_Integer and not eq.lhs.is_Symbol}


def get_replacement(value: Symbolic) -> Callable[[sympy.Expr], sympy.Expr]:
    """Returns a function that applies the graph's replacements of symbols to an expression. Relies on `ShapeEnv.replace`."""
    return value.node.shape_env.replace  # type: ignore[no-any-return]


def upper_bound(symbol: sympy.Symbol, value: Symbolic) -> int | None:
    """Returns the declared or guarded maximum of a symbol of the value's graph; None if there is none.

    Relies on `ShapeEnv.var_to_range`, whose `upper` is infinite for an unbounded symbol.
    """
    ranges = value.node.shape_env.var_to_range
    upper = ranges[symbol].upper if symbol in ranges else None
    return int(upper) if upper is not None and getattr(upper, "is_Integer", isinstance(upper, int)) else None


def guards(value: Symbolic) -> list[sympy.Expr]:
    """Returns the conditions on sizes under which the value's graph holds, beside being 2 or more.

    Relies on `ShapeEnv.guards`, each with its `expr`.
    """
    return [guard.expr for guard in value.node.shape_env.guards]


def add_deferred_checks(module: GraphModule) -> None:
    """Adds the checks of sizes that are known only when the graph runs, each computed of what the graph reads.

    Dynamo's graph has them, but of `torch._check(n == x.size(0))` AOTAutograd writes the size for n, also in the check itself.
    Relies on `unbacked_bindings` in a node's `meta`, on `ShapeEnv.deferred_runtime_asserts`, and on
    `insert_deferred_runtime_asserts`.
    """
    values = tree_leaves([n.meta["val"] for n in module.graph.nodes if n.meta.get("unbacked_bindings")])
    numbers = (number for value in values for number in (value.shape if isinstance(value, torch.Tensor) else (value,)))
    known = next((number for number in numbers if isinstance(number, _SYMBOLIC_TYPES)), None)
    if known is not None and known.node.shape_env.deferred_runtime_asserts:
        insert_deferred_runtime_asserts(module, known.node.shape_env, "checks")
        module.recompile()


def describe_known_sizes(value: Symbolic) -> Iterator[list[str]]:
    """Yields descriptions of the symbols of the value's graph: their ranges, their replacements, and the guards.

    Relies on `ShapeEnv.var_to_range`, `ShapeEnv.replacements` and `ShapeEnv.guards`.
    """
    env = value.node.shape_env
    yield [f"{symbol} in {its.lower}, {its.upper}" for symbol, its in env.var_to_range.items()]
    yield [f"{symbol} is {its}" for symbol, its in env.replacements.items()]
    yield [str(guard.expr) for guard in env.guards]
