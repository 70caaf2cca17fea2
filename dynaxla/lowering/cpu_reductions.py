"""Controls which reductions XLA's CPU compiler hands to its library (YNN).

XLA hands large reductions, fused with their producers and consumers, to a library. The library sums rows up to four times as
fast as XLA's own loops, and columns and short rows up to a hundred times as slow. Its other results differ: it drops NaN in
maxima and minima, and omits conversions to narrower types and back.
`has_exact_fusions` makes sure that no such thing is left; this module, that sums need not be compiled without the library
for it.
Of maxima the library computes those by which `SHIFTED` ops shift their exponents: in these, NaN may be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from dynaxla.custom_ops import internal
from dynaxla.lowering.stablehlo_module import StablehloModules, walk
from dynaxla.runtime.executable_info import ANY_NAN, FRONTEND_ATTRIBUTES, NOT_INLINED

aten = torch.ops.aten

# Of jaxlib's bindings of MLIR, which have no types.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Value: TypeAlias = Any

_FEWEST = 4096
"""Number of elements of an operand from which XLA hands its reduction to the library."""

_SHORTEST = 64
"""Number of elements per sum from which the library is faster than XLA."""

_REDUCTIONS = ("stablehlo.reduce", "stablehlo.reduce_window")
_COMPARISONS = {"stablehlo.maximum": "GT", "stablehlo.minimum": "LT"}


SHIFTED = frozenset(
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten.logsumexp.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        internal.ATTENTION,
    }
)
"""Ops of exponents less the largest of a row. A NaN in the row makes their result NaN, whatever is taken away."""


def keep_reductions_apart(mlir: StablehloModules, module: Module, *, drops_nan: bool = False) -> None:
    """Lets the library compute the sums of floats that it computes faster, the extremes too where NaN may be left out, and
    nothing else.

    What it computes moves into functions that XLA does not inline, so that neither producers nor consumers are fused with
    it. The reducers of all other reductions are rewritten to a form that the library does not recognize.

    Args:
        drops_nan: whether maxima and minima may leave out NaN, so that the library computes them, too.
    """
    for operation in list(walk(module.operation)):
        reducer = _reducer(mlir, operation)
        if reducer is None or not _is_given_away(mlir, operation):
            continue
        with operation.location:
            if operation.name == "stablehlo.reduce_window" or not _is_of_rows(mlir, operation):
                _round(mlir, reducer)
            elif _is_long(mlir, operation) and (
                reducer.name not in _COMPARISONS or (drops_nan and _is_single(mlir, reducer))
            ):
                _outline(mlir, operation, module)
            elif reducer.name in _COMPARISONS:
                _select(mlir, reducer)
            else:
                _round(mlir, reducer)


def carry_nan(mlir: StablehloModules, module: Module) -> None:
    """Has maxima and minima be NaN where an element is, by a reduction of their own.

    The collectives of XLA's CPU client drop NaN in maxima and minima, and know no other reducers than plain ones.
    """
    for operation in list(walk(module.operation)):
        reducer = _reducer(mlir, operation) if operation.name == "stablehlo.reduce" else None
        if reducer is not None and reducer.name in _COMPARISONS:
            with operation.location:
                _restore_nan(mlir, operation)


def _restore_nan(mlir: StablehloModules, extreme: Operation) -> None:
    ir = mlir.ir
    result, at = extreme.results[0], ir.InsertionPoint.after(extreme)
    flag = ir.IntegerType.get_signless(1)
    scalar = ir.RankedTensorType.get([], flag)
    element = ir.RankedTensorType(result.type).element_type

    def make(name: str, shape: Sequence[int], kind: Any, *operands: Value, **attributes: object) -> Operation:
        made = ir.RankedTensorType.get(shape, kind)
        return ir.Operation.create(f"stablehlo.{name}", [made], operands, attributes=attributes, ip=at)

    operand = extreme.operands[0]
    differs = mlir.stablehlo.ComparisonDirectionAttr.get("NE")
    nan = make("compare", _shape(mlir, operand), flag, operand, operand, comparison_direction=differs)
    none = make("constant", [], flag, value=ir.DenseElementsAttr.get_splat(scalar, ir.BoolAttr.get(False)))
    any_nan = ir.Operation.create(
        "stablehlo.reduce",
        [ir.RankedTensorType.get(_shape(mlir, result), flag)],
        [nan.result, none.result],
        attributes={"dimensions": extreme.attributes["dimensions"]},
        regions=1,
        ip=at,
    )
    block = ir.Block.create_at_start(any_nan.regions[0], [scalar, scalar])
    inside = ir.InsertionPoint(block)
    either = ir.Operation.create("stablehlo.or", [scalar], list(block.arguments), ip=inside)
    ir.Operation.create("stablehlo.return", operands=[either.result], ip=inside)
    splat = ir.DenseElementsAttr.get_splat(result.type, ir.FloatAttr.get(element, math.nan))
    filled = make("constant", _shape(mlir, result), element, value=splat)
    chosen = make("select", _shape(mlir, result), element, any_nan.result, filled.result, result)
    result.replace_all_uses_except(chosen.result, chosen)


def has_reductions(module: Module) -> bool:
    """Whether `keep_reductions_apart` might change the module at other sizes."""
    return any(operation.name in _REDUCTIONS for operation in walk(module.operation))


def _reducer(mlir: StablehloModules, operation: Operation) -> Operation | None:
    """The operation by which a reduction of one float tensor combines two elements: an addition, maximum or minimum."""
    if operation.name not in _REDUCTIONS or len(operation.results) != 1:
        return None
    ir = mlir.ir
    element = ir.RankedTensorType(operation.results[0].type).element_type
    first, *rest = operation.regions[0].blocks[0].operations
    is_float = isinstance(element, (ir.BF16Type, ir.F16Type, ir.F32Type, ir.F64Type))
    is_known = first.operation.name in ("stablehlo.add", *_COMPARISONS)
    return first.operation if is_float and is_known and len(rest) == 1 else None


def _shape(mlir: StablehloModules, value: Value) -> Sequence[int]:
    return list(mlir.ir.RankedTensorType(value.type).shape)


def _reduced(reduce: Operation) -> Sequence[int]:
    return list(reduce.attributes["dimensions"])


def _is_given_away(mlir: StablehloModules, reduction: Operation) -> bool:
    """Whether XLA might hand the reduction to the library: it is large, and its windows, if any, do not overlap.

    XLA computes overlapping windows, as in `cumsum`, by itself.
    """
    operand = _shape(mlir, reduction.operands[0])
    if max(math.prod(operand), math.prod(_shape(mlir, reduction.results[0]))) < _FEWEST:
        return False
    if reduction.name == "stablehlo.reduce":
        return True
    sizes, strides = (
        list(reduction.attributes[each]) if each in reduction.attributes else [1] * len(operand)
        for each in ("window_dimensions", "window_strides")
    )
    return all(size in (1, stride) for size, stride in zip(sizes, strides, strict=True))


def _is_of_rows(mlir: StablehloModules, reduce: Operation) -> bool:
    """Whether the reduced elements are neighbours in memory."""
    shape = _shape(mlir, reduce.operands[0])
    return max((dim for dim, size in enumerate(shape) if size > 1), default=0) in _reduced(reduce)


def _is_long(mlir: StablehloModules, reduce: Operation) -> bool:
    """Whether so many elements are reduced to one that the library is faster."""
    shape = _shape(mlir, reduce.operands[0])
    return math.prod(shape[dim] for dim in _reduced(reduce)) >= _SHORTEST


def _is_single(mlir: StablehloModules, reducer: Operation) -> bool:
    """Whether a reducer combines elements of float32, of which alone the library knows the extremes."""
    return isinstance(mlir.ir.RankedTensorType(reducer.results[0].type).element_type, mlir.ir.F32Type)


def _select(mlir: StablehloModules, extreme: Operation) -> None:
    """Writes `extreme(a, b)` as `select(a is beyond b or a is NaN, a, b)`: a NaN in `b` is beyond nothing.

    XLA's own loop over a row is up to three times as fast with it, too.
    """
    ir = mlir.ir
    a, b = extreme.operands
    at, flag = ir.InsertionPoint(extreme), ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))

    def compare(left: Value, right: Value, direction: str) -> Value:
        attributes = {"comparison_direction": mlir.stablehlo.ComparisonDirectionAttr.get(direction)}
        return ir.Operation.create("stablehlo.compare", [flag], [left, right], attributes=attributes, ip=at).result

    beyond, nan = compare(a, b, _COMPARISONS[extreme.name]), compare(a, a, "NE")
    either = ir.Operation.create("stablehlo.or", [flag], [beyond, nan], ip=at).result
    select = ir.Operation.create("stablehlo.select", [extreme.results[0].type], [either, a, b], ip=at)
    extreme.results[0].replace_all_uses_with(select.result)
    extreme.erase()


def _round(mlir: StablehloModules, reducer: Operation) -> None:
    """Rounds the reducer's result to the precision in which XLA reduces.

    Neither numbers nor speed change, but the library does not recognize such a reducer.
    """
    ir = mlir.ir
    result = reducer.results[0]
    is_double = isinstance(ir.RankedTensorType(result.type).element_type, ir.F64Type)
    # XLA reduces 16-bit floats in 32 bits.
    exponent, mantissa = (
        ir.IntegerAttr.get(ir.IntegerType.get_signless(32), n) for n in ((11, 52) if is_double else (8, 23))
    )
    rounded = ir.Operation.create(
        "stablehlo.reduce_precision",
        [result.type],
        [result],
        attributes={"exponent_bits": exponent, "mantissa_bits": mantissa},
        ip=ir.InsertionPoint.after(reducer),
    )
    result.replace_all_uses_except(rounded.result, rounded)


def _outline(mlir: StablehloModules, reduction: Operation, module: Module) -> None:
    """Moves a reduction into a function that XLA does not inline. An extreme is marked as one that may leave out NaN."""
    ir = mlir.ir
    if _reducer(mlir, reduction).name in _COMPARISONS:  # type: ignore[union-attr]
        reduction.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get({ANY_NAN: ir.StringAttr.get("true")})
    functions = module.body.operations
    name = f"{mlir.symbol_name(functions[0])}.rows{len(functions)}"
    operands, results = list(reduction.operands), [result.type for result in reduction.results]
    kinds = [operand.type for operand in operands]
    attributes = {
        "sym_name": ir.StringAttr.get(name),
        "sym_visibility": ir.StringAttr.get("private"),
        "function_type": ir.TypeAttr.get(ir.FunctionType.get(kinds, results)),
    }
    function = ir.Operation.create("func.func", attributes=attributes, regions=1, ip=ir.InsertionPoint(module.body))
    block = ir.Block.create_at_start(function.regions[0], kinds)
    kept = {
        "callee": ir.FlatSymbolRefAttr.get(name),
        FRONTEND_ATTRIBUTES: ir.DictAttr.get({NOT_INLINED[0]: ir.StringAttr.get(NOT_INLINED[1])}),
    }
    call = ir.Operation.create("func.call", results, operands, attributes=kept, ip=ir.InsertionPoint(reduction))
    reduction.results[0].replace_all_uses_with(call.result)
    end = ir.Operation.create("func.return", operands=[call.result], ip=ir.InsertionPoint(block))
    reduction.move_before(end)
    for index, argument in enumerate(block.arguments):
        reduction.operands[index] = argument
    end.operands[0] = reduction.results[0]
