"""True sizes as expressions over the graph's symbols, and what they are at a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min
from torch.utils._sympy.printers import PythonPrinter

Size = Any
"""A true size: an int, or a sympy expression over the part's symbols."""


def size_of(value: Any) -> Size:
    """The expression of a plain or symbolic number; a plain number where it is one."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = value.node.expr
    if isinstance(value, sympy.logic.boolalg.BooleanAtom):
        return bool(value)
    if isinstance(value, sympy.Integer):
        return int(value)
    return float(value) if isinstance(value, sympy.Float) else value


def is_fixed(size: Size) -> bool:
    return isinstance(size, (int, float))


def is_varying(value: Any) -> bool:
    """Whether an argument is a size that is not fixed."""
    return hasattr(value, "free_symbols") and not is_fixed(value)


def at(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    """The size where the symbols have these values."""
    return size if isinstance(size, int) else int(size.xreplace({s: sympy.Integer(v) for s, v in values.items()}))


def is_monotone(size: Size) -> bool:
    """Whether the size never falls when a symbol grows: only then does the size at a bucket hold the true one.

    Symbols are sizes, so not negative. `128 - s0` and `s0 % 8` are refused.
    """
    if isinstance(size, (int, sympy.Integer, sympy.Symbol)):
        return True
    if isinstance(size, sympy.Mul):
        return all(is_monotone(f) and not (f.is_number and f < 0) for f in size.args)
    if isinstance(size, (FloorDiv, CeilDiv)):
        return is_monotone(size.args[0]) and bool(size.args[1].is_number and size.args[1] > 0)
    if isinstance(size, sympy.Pow):
        return is_monotone(size.base) and bool(size.exp.is_number and size.exp > 0)
    return isinstance(size, (sympy.Add, Max, Min, sympy.Max, sympy.Min)) and all(map(is_monotone, size.args))


def compile_sizes(sizes: Sequence[Size], symbols: Sequence[sympy.Symbol]) -> Callable[..., tuple[int, ...]]:
    """A plain Python function from the symbols' values to the sizes: no sympy per call."""
    names = {symbol: sympy.Symbol(f"a{i}", integer=True) for i, symbol in enumerate(symbols)}
    printer = PythonPrinter()
    texts = [str(s) if isinstance(s, int) else printer.doprint(s.xreplace(names)) for s in sizes]
    code = f"lambda {', '.join(map(str, names.values()))}: ({''.join(f'{text}, ' for text in texts)})"
    return eval(code, {"math": math})  # type: ignore[no-any-return]
