"""Finds a part's symbols, where their values are read, and which of them are runtime scalars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import sympy
import torch
from torch.fx import Graph, Node

from dynaxla.bucket_policy import Exact
from dynaxla.bucketing.argument_roles import non_size_arguments
from dynaxla.bucketing.pad_rule import PadRules, rule_of
from dynaxla.bucketing.size_buckets import BucketScheme, SizeSource, SymbolPolicies
from dynaxla.bucketing.size_expressions import is_fixed, is_varying, size_of
from dynaxla.custom_ops.schema import arguments_of
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.symbols import Symbolic, get_replacement, upper_bound


def make_bucket_scheme(
    graph: Graph,
    arguments: Iterable[int | None],
    policies: SymbolPolicies,
    rules: PadRules,
) -> BucketScheme | None:
    """Makes the bucket scheme of a part. Returns None if a symbol's value cannot be read from the arguments.

    A symbol on which no tensor's size depends is a runtime scalar: one program serves all of its values. If it reaches an
    argument whose role allows no size, it is bucketed like a size, each value exactly.

    Args:
        graph: the part's graph, with `meta["val"]` on every node.
        arguments: per placeholder the index of the caller's argument, or None if it is none of them.
        policies: the policies of the graph's symbols.
        rules: the pad rule of each op.
    """
    found, wanted = _read_at(graph, arguments)
    if wanted.keys() - found.keys():
        return None
    ordered = sorted(found, key=str)
    if ordered:
        policies = policies.settle(get_replacement(wanted[ordered[0]]))
    numbers = found.keys() - _symbols_of_sizes(graph)
    constants = numbers & _constants(graph, rules) if numbers else set()
    policies = replace(policies, given={**policies.given, **dict.fromkeys(constants, Exact())})
    symbols = tuple(symbol for symbol in ordered if symbol not in numbers - constants)
    scalars = tuple(symbol for symbol in ordered if symbol in numbers - constants)
    sources = tuple(found[symbol] for symbol in (*symbols, *scalars))
    limits = tuple(upper_bound(symbol, wanted[symbol]) for symbol in symbols)
    return BucketScheme.initial(symbols, sources, limits, policies, scalars)


def _read_at(
    graph: Graph, arguments: Iterable[int | None]
) -> tuple[dict[sympy.Symbol, SizeSource], dict[sympy.Symbol, torch.SymInt]]:
    """Where each symbol can be read, and for every symbol a symbolic size that contains it."""
    found: dict[sympy.Symbol, SizeSource] = {}
    wanted: dict[sympy.Symbol, torch.SymInt] = {}
    for node, argument in zip(graph.find_nodes(op="placeholder"), arguments, strict=True):
        value = node.meta["val"]
        sizes = [(i, s) for i, s in enumerate(value.shape)] if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            is_whole = isinstance(size, torch.SymInt)
            expression = size_of(size) if isinstance(size, Symbolic) else 0
            if is_fixed(expression):
                continue
            wanted.update(dict.fromkeys(expression.free_symbols, size))
            source = _source(expression, argument, dim) if is_whole and argument is not None else None
            if source is not None:
                found.setdefault(*source)
    return found, wanted


def _symbols_of_sizes(graph: Graph) -> set[sympy.Symbol]:
    """The symbols on which the size of a tensor depends. Strides and offsets do not count: programs see row-major tensors."""
    found: set[sympy.Symbol] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor):
                varying = [size for size in map(size_of, tensor.shape) if not is_fixed(size)]
                found.update(symbol for size in varying for symbol in size.free_symbols)
    return found


def _constants(graph: Graph, rules: PadRules) -> set[sympy.Symbol]:
    """The symbols that reach an argument whose role allows no size."""
    found: set[sympy.Symbol] = set()
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            rule = rule_of(node.target, rules)
            for _, number in non_size_arguments(rule.arguments(node.target), arguments_of(node)):
                size = size_of(number.meta["val"] if isinstance(number, Node) else number)
                found.update(size.free_symbols if is_varying(size) else ())
    return found


def _source(size: sympy.Expr, argument: int, dim: int | None) -> tuple[sympy.Symbol, SizeSource] | None:
    """The symbol that a size determines, and where to read it; None if the size is not factor * symbol + offset with whole
    numbers (offset: a cache to which an eager op added a token)."""
    offset, multiple = size.as_coeff_Add()
    factor, rest = multiple.as_coeff_Mul()
    if isinstance(rest, sympy.Symbol) and factor.is_Integer and offset.is_Integer:
        return rest, SizeSource(argument, dim, int(factor), int(offset))
    return None
