"""Calls of a graph at every bucket that is declared for it, so that all of its programs are compiled before it is packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from dynaxla.bucket_policy import BucketPolicy
from dynaxla.bucket_policy.declared import SMALLEST, combinations, declared_buckets
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.bucketing.size_expressions import size_of
from dynaxla.decompositions.assertions import is_of_assertion
from dynaxla.errors import DynaxlaError, PackageError
from dynaxla.passes.manager import GraphFunction
from dynaxla.torch_api.fakes import disable_modes
from dynaxla.torch_api.symbols import example_of, get_replacement

Sizes = Mapping[sympy.Symbol, int]


def call_at_declared_buckets(
    function: GraphFunction, values: Sequence[Any], policies: SymbolPolicies, most: int
) -> None:
    """Calls a graph with stand-ins, zeros, at every declared bucket; where nothing is declared, at the example's sizes.

    Dims of one range and one size in the example vary together, as in `dynaxla.warmup`.

    Args:
        values: the fake values of the graph's inputs.
        most: how many programs of a part are kept.

    Raises:
        PackageError: more buckets are declared than programs are kept, or such a call fails.
    """
    calls = list(_declared(values, policies))
    if len(calls) > most:
        explanation = f"{len(calls)} buckets are declared, and options keep {most} programs"
        raise PackageError(explanation, "raise options={'max_executables': ...}, or declare fewer")
    fixed: dict[int, Any] = {}
    with disable_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for sizes in calls:
            arguments = [_stand_in(i, value, sizes, fixed) for i, value in enumerate(values)]
            try:
                function(arguments)
            except DynaxlaError:
                raise
            except Exception as error:  # of eager ops between programs, which zeros may not do for
                if is_of_assertion(error):
                    continue
                told = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
                raise PackageError(f"a trial call of the graph at {told or 'its sizes'} failed: {error}") from error


def _declared(values: Sequence[Any], policies: SymbolPolicies) -> Iterator[Sizes]:
    """The sizes of each call."""
    symbolic = [number for value in values for number in _numbers(value) if isinstance(number, torch.SymInt)]
    symbols = sorted({symbol for number in symbolic for symbol in _symbols(number)}, key=str)
    if not symbols:
        yield {}
        return
    policies = policies.settle(get_replacement(symbolic[0]))
    ranges = {symbol: (policies.given.get(symbol), example_of(symbol, symbolic[0])) for symbol in symbols}
    for sizes in combinations({each: _buckets(*each) for each in ranges.values()}):
        yield {symbol: sizes[its] for symbol, its in ranges.items()}


def _buckets(policy: BucketPolicy | None, size: int) -> tuple[int, ...]:
    """The buckets of sizes that one graph of Dynamo's takes: not 0 and 1; the example's size where nothing is declared."""
    declared = declared_buckets(policy)
    if declared is None or policy is None:
        return (size,)
    return tuple(dict.fromkeys(policy.bucket(max(bucket, SMALLEST)) for bucket in declared))


def _stand_in(position: int, value: Any, sizes: Sizes, fixed: dict[int, Any]) -> Any:
    """Zeros of the sizes, strides and dtype of an input; one tensor at all calls where none of these varies."""
    if position in fixed:
        return fixed[position]
    if not isinstance(value, torch.Tensor):
        return _at(value, sizes)
    shape, strides = ([_at(number, sizes) for number in numbers] for numbers in (value.shape, value.stride()))
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).zero_()
    if not any(isinstance(number, torch.SymInt) for number in _numbers(value)):
        fixed[position] = made
    return made


def _at(number: Any, sizes: Sizes) -> Any:
    size = size_of(number)
    return int(size.xreplace(sizes)) if isinstance(size, sympy.Expr) else size


def _numbers(value: Any) -> list[Any]:
    return [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]


def _symbols(number: torch.SymInt) -> set[sympy.Symbol]:
    size = size_of(number)
    return size.free_symbols if isinstance(size, sympy.Expr) else set()
