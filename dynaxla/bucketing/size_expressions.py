"""True sizes as expressions over the graph's symbols: simplification, evaluation and bounds."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import sympy
import torch

from dynaxla.torch_api import size_functions
from dynaxla.torch_api.size_functions import (
    BITWISE,
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
    as_python,
)
from dynaxla.torch_api.symbols import expression

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Size: TypeAlias = int | float | sympy.Expr
"""A true size: an int, or a sympy expression over the part's symbols."""

_MIN_PADDED_SIZE = 2  # sizes 0 and 1 are never padded
_MAX_EVALUATED = 1 << 13  # up to this many combinations of sizes are all evaluated, which takes some milliseconds


def size_of(value: Any) -> Size:
    """The sympy expression of a symbolic number; a plain number (or a constant expression) as an int, float or bool."""
    value = expression(value)
    if isinstance(value, sympy.logic.boolalg.BooleanAtom):
        return bool(value)
    if isinstance(value, sympy.Integer):
        return int(value)
    return float(value) if isinstance(value, sympy.Float) else value


def simplify(size: Size) -> Size:
    """Simplifies a size: removes remainders that round to a multiple, and exact divisions.

    x + (8 - x % 8) % 8 is 8 * ceil(x / 8), x ** 2 // x is x, ceil(x - 0.5) is x, and int((x ** 2) ** 0.5) too.
    """
    if is_fixed(size) or not size.has(Mod, PythonMod, FloorDiv, CeilToInt, FloorToInt, TruncToInt):
        return size
    whole = size.replace(lambda e: isinstance(e, sympy.Add), _round_to_multiple)
    whole = whole.replace(lambda e: isinstance(e, (CeilToInt, FloorToInt)), _split_rounding)
    whole = whole.replace(lambda e: isinstance(e, TruncToInt), _simplify_root)
    return size_of(whole.replace(lambda e: isinstance(e, FloorDiv), _divide_exactly))


def _split_rounding(rounding: sympy.Expr) -> sympy.Expr:
    """An integer plus a constant fraction, rounded, becomes the integer plus the rounded fraction."""
    value = rounding.args[0]
    if isinstance(value, FloatTrueDiv) and value.args[1].is_number and float(value.args[1]) == 1.0:
        value = value.args[0]
    fraction, whole = value.as_coeff_Add()
    if not isinstance(whole, ToFloat):
        return rounding
    return whole.args[0] + (sympy.ceiling(fraction) if isinstance(rounding, CeilToInt) else sympy.floor(fraction))


def _divide_exactly(quotient: sympy.Expr) -> sympy.Expr:
    """A floor division becomes its exact quotient if it has no remainder at any size."""
    if quotient.args[1].is_number or quotient.has(Mod, PythonMod):
        return quotient
    exact = sympy.cancel(quotient.args[0] / quotient.args[1])
    return exact if exact.is_integer else quotient


def _simplify_root(truncated: sympy.Expr) -> sympy.Expr:
    """int((x ** 2) ** 0.5) becomes x: the root of a square is exact in floats."""
    power = truncated.args[0]
    if not isinstance(power, FloatPow) or not power.args[1].is_number or float(power.args[1]) != 0.5:
        return truncated
    square = power.args[0].args[0] if isinstance(power.args[0], ToFloat) else None
    return square.base if isinstance(square, sympy.Pow) and square.exp == 2 else truncated


def _round_to_multiple(total: sympy.Expr) -> sympy.Expr:
    """A sum that a remainder rounds down (x - x % n) or up (x + -x % n) becomes a multiple of n."""
    for term in total.args:
        number, remainder = term.as_coeff_Mul()
        if not isinstance(remainder, (Mod, PythonMod)) or number not in (1, -1):
            continue
        whole, of = total - term, remainder.args[1]
        if number == -1 and remainder.args[0] == whole:
            return FloorDiv(whole, of) * of
        if number == 1 and _is_negative_of(remainder.args[0], whole, of):
            return FloorDiv(whole + of - 1, of) * of
    return total


def _is_negative_of(value: sympy.Expr, whole: sympy.Expr, of: sympy.Expr) -> bool:
    """Whether value + whole is a multiple of `of`."""
    if value == -whole or value == of - PythonMod(whole, of):
        return True
    return not whole.is_negative and bool(value == of - Mod(whole, of))  # torch's Mod is undefined for negative numbers


def is_fixed(size: object) -> TypeIs[int | float]:
    return isinstance(size, (int, float))


def is_varying(value: object) -> TypeGuard[sympy.Expr]:
    """Whether an argument is a symbolic size."""
    return hasattr(value, "free_symbols") and not is_fixed(value)


def evaluate(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    """Evaluates the size at these values of the symbols."""
    return int(size) if is_fixed(size) else int(size.xreplace({s: sympy.Integer(v) for s, v in values.items()}))


def upper_bound(size: Size, buckets: Mapping[sympy.Symbol, int]) -> int | None:
    """An upper bound of the size over all symbols from 2 to their buckets; None if no bound is found.

    A size that grows with its symbols is largest at the buckets. `128 - s0` is largest at the least s0, and `s0 % 8`
    somewhere in between: the size is then evaluated at all values of the symbols if these are few (`_MAX_EVALUATED`); else the
    bound follows from interval bounds of each operation in the expression.
    """
    if is_fixed(size):
        return math.ceil(size)
    symbols = sorted(size.free_symbols, key=str)
    if not buckets.keys() >= set(symbols):
        return None
    if is_monotone(size):
        return evaluate(size, buckets)
    ranges = [range(_MIN_PADDED_SIZE, buckets[symbol] + 1) for symbol in symbols]
    if math.prod(map(len, ranges)) > _MAX_EVALUATED:
        return size_functions.upper_bound(size, {symbol: (_MIN_PADDED_SIZE, buckets[symbol]) for symbol in symbols})
    values = compile_sizes([size], symbols)
    return max(_evaluate_all(values, itertools.product(*ranges)), default=None)


def _evaluate_all(values: Callable[..., tuple[int, ...]], combinations: Iterable[tuple[int, ...]]) -> Iterator[int]:
    """Yields the size at these combinations of the symbols' values, except those where it is undefined."""
    for sizes in combinations:
        with contextlib.suppress(ZeroDivisionError, ValueError):  # undefined there: no tensor has this size
            yield values(*sizes)[0]


def is_monotone(size: Size) -> bool:
    """Whether the size never decreases when a symbol grows: the size at a bucket is then an upper bound.

    Symbols are sizes, so not negative. `128 - s0` and `s0 % 8` are not monotone.
    """
    return _is_nondecreasing(size)


def _is_nondecreasing(size: Size) -> bool:
    if isinstance(size, (int, float, sympy.Number, sympy.Symbol)):
        return True
    if isinstance(size, sympy.Mul):
        number, rest = size.as_coeff_Mul()
        if number < 0:
            return _is_nonincreasing(rest)
        factors = sympy.Mul.make_args(rest)
        # A product of two factors that may be negative may decrease. With one such factor it would be negative: no size is.
        return all(map(_is_nondecreasing, factors)) and sum(map(_may_be_negative, factors)) < 2
    if isinstance(size, (FloorDiv, CeilDiv, IntTrueDiv, FloatTrueDiv)):
        return _is_positive(size.args[1]) and _is_nondecreasing(size.args[0])
    if isinstance(size, (sympy.Pow, FloatPow)):
        return _is_positive(size.args[1]) and _is_nondecreasing(size.args[0]) and not _may_be_negative(size.args[0])
    return isinstance(size, (sympy.Add, *_MONOTONE_FUNCTIONS)) and all(map(_is_nondecreasing, size.args))


def _may_be_negative(size: sympy.Expr) -> bool:
    """Whether the size has a subtraction and is not known to be non-negative."""
    sums = size.atoms(sympy.Add)
    return not size.is_nonnegative and any(term.as_coeff_Mul()[0] < 0 for each in sums for term in each.args)


def _is_nonincreasing(size: Size) -> bool:
    """Whether the size never increases when a symbol grows."""
    if isinstance(size, (int, float, sympy.Number)):
        return True
    if isinstance(size, sympy.Mul):
        number, rest = size.as_coeff_Mul()
        if number < 0:
            return _is_nondecreasing(rest)
        return isinstance(rest, (sympy.Add, *_MONOTONE_FUNCTIONS)) and _is_nonincreasing(rest)
    if isinstance(size, FloorDiv):
        return _is_positive(size.args[1]) and _is_nonincreasing(size.args[0])
    return isinstance(size, (sympy.Add, *_MONOTONE_FUNCTIONS)) and all(map(_is_nonincreasing, size.args))


def _is_positive(size: sympy.Expr) -> bool:
    return bool(size.is_number and size > 0)


# Functions that are monotone in each of their arguments.
_MONOTONE_FUNCTIONS = (
    *(Max, Min, sympy.Max, sympy.Min, TruncToInt, FloorToInt, CeilToInt, RoundToInt, ToFloat),
    *(OpaqueUnaryFn_sqrt, OpaqueUnaryFn_log2),
)


def compile_sizes(sizes: Sequence[Size], symbols: Sequence[sympy.Symbol]) -> Callable[..., tuple[int, ...]]:
    """Compiles the sizes to a plain Python function of the symbols' values, so that a call runs no sympy."""
    names = {symbol: sympy.Symbol(f"a{i}", integer=True) for i, symbol in enumerate(symbols)}
    texts = [str(s) if is_fixed(s) else as_python(s.xreplace(names)) for s in sizes]
    return compile_source(f"lambda {', '.join(map(str, names.values()))}: ({''.join(f'{text}, ' for text in texts)})")


def compile_source(code: str) -> Callable[..., tuple[int, ...]]:
    """Makes the function of `compile_sizes` from its source, which is its `__doc__`, so that other processes can too."""
    made: Callable[..., tuple[int, ...]] = eval(code, {"math": math, "torch": torch})
    made.__doc__ = code
    return made


def is_whole(size: sympy.Expr) -> bool:
    """Whether an expression is an integer or a bool at all sizes."""
    return bool(size.is_integer) or isinstance(size, sympy.logic.boolalg.Boolean) or type(size).__name__ in BITWISE
