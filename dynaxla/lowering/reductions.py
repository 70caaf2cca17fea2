"""Gives XLA's CPU compiler sums in functions of their own, and maxima and minima that no library takes.

XLA gives large reductions, with what they are computed of and what is computed of them, to a library (YNN) that sums two to
eight times as fast as XLA's own loops, and computes other things differently: it drops NaN in maxima and minima, leaves
out conversions to 8-bit integers and 16-bit floats and back, and overflows in `exp` before the result does.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from dynaxla.lowering.jax_mlir import JaxMlir, walk

# Of jaxlib's bindings of MLIR, which have no types.
Module: TypeAlias = Any
Operation: TypeAlias = Any

FEWEST = 4096
"""Elements of the smallest operand whose reduction XLA gives away."""

_BITS = {"bf16": (8, 7), "f16": (5, 10), "f32": (8, 23), "f64": (11, 52)}
"""Of exponent and mantissa."""

_COMPARISONS = {"stablehlo.maximum": "GT", "stablehlo.minimum": "LT"}


def keep_reductions_apart(mlir: JaxMlir, module: Module) -> None:
    """Puts large sums of floats into functions that XLA does not inline, and writes float extremes of many elements as selects.

    The library is left with the sums, and with nothing that feeds them. The reducers of maxima and minima become
    comparisons, which it does not know.
    """
    for operation in list(walk(module.operation)):
        reducer = _reducer(mlir, operation)
        if reducer is None:
            continue
        if operation.name == "stablehlo.reduce_window":
            if _is_apart(operation):
                _round(mlir, reducer)
        elif reducer.name in _COMPARISONS:
            _select(mlir, reducer)
        elif reducer.name == "stablehlo.add" and _is_large(mlir, operation):
            _outline(mlir, operation, module)


def _reducer(mlir: JaxMlir, operation: Operation) -> Operation | None:
    """The only operation of the reducer of a reduction of one tensor of floats."""
    if operation.name not in ("stablehlo.reduce", "stablehlo.reduce_window") or len(operation.results) != 1:
        return None
    ir = mlir.ir
    element = ir.RankedTensorType(operation.results[0].type).element_type
    first, *rest = operation.regions[0].blocks[0].operations
    is_float = isinstance(element, (ir.BF16Type, ir.F16Type, ir.F32Type, ir.F64Type))
    return first.operation if is_float and len(rest) == 1 else None


def _is_large(mlir: JaxMlir, operation: Operation) -> bool:
    shapes = (mlir.ir.RankedTensorType(v.type).shape for v in (operation.operands[0], operation.results[0]))
    return max(map(math.prod, shapes)) >= FEWEST


def _is_apart(window: Operation) -> bool:
    """Whether the windows do not overlap. XLA gives only such to the library, and knows sums of others, as in `cumsum`."""
    sizes = list(window.attributes["window_dimensions"])
    strides = list(window.attributes["window_strides"]) if "window_strides" in window.attributes else [1] * len(sizes)
    return all(size in (1, stride) for size, stride in zip(sizes, strides, strict=True))


def _select(mlir: JaxMlir, extreme: Operation) -> None:
    """Writes `extreme(a, b)` as `select(a is beyond b or a is NaN, a, b)`: a NaN in `b` is beyond nothing."""
    ir = mlir.ir
    a, b = extreme.operands
    at, flag = ir.InsertionPoint(extreme), ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))

    def compare(left: Any, right: Any, direction: str) -> Any:
        attribute = mlir.stablehlo.ComparisonDirectionAttr.get(direction)
        attributes = {"comparison_direction": attribute}
        return ir.Operation.create("stablehlo.compare", [flag], [left, right], attributes=attributes, ip=at).result

    beyond, nan = compare(a, b, _COMPARISONS[extreme.name]), compare(a, a, "NE")
    either = ir.Operation.create("stablehlo.or", [flag], [beyond, nan], ip=at).result
    select = ir.Operation.create("stablehlo.select", [extreme.results[0].type], [either, a, b], ip=at)
    extreme.results[0].replace_all_uses_with(select.result)
    extreme.erase()


def _round(mlir: JaxMlir, reducer: Operation) -> None:
    """Rounds what a reducer makes to the precision that it has, which is nothing to do, but no reducer that the library knows."""
    ir = mlir.ir
    result = reducer.results[0]
    exponent, mantissa = _BITS[str(ir.RankedTensorType(result.type).element_type)]
    width = ir.IntegerType.get_signless(32)
    rounded = ir.Operation.create(
        "stablehlo.reduce_precision",
        [result.type],
        [result],
        attributes={
            "exponent_bits": ir.IntegerAttr.get(width, exponent),
            "mantissa_bits": ir.IntegerAttr.get(width, mantissa),
        },
        ip=ir.InsertionPoint.after(reducer),
    )
    result.replace_all_uses_except(rounded.result, rounded)


def _outline(mlir: JaxMlir, reduction: Operation, module: Module) -> None:
    """Moves a reduction into a function of its own, whose calls XLA keeps."""
    ir = mlir.ir
    name = f"dynaxla_sum_{len(module.body.operations)}"
    kinds = [operand.type for operand in reduction.operands]
    signature = ir.FunctionType.get(kinds, [reduction.results[0].type])
    attributes = {
        "sym_name": ir.StringAttr.get(name),
        "sym_visibility": ir.StringAttr.get("private"),
        "function_type": ir.TypeAttr.get(signature),
    }
    function = ir.Operation.create("func.func", attributes=attributes, regions=1, ip=ir.InsertionPoint(module.body))
    block = ir.Block.create_at_start(function.regions[0], kinds)
    call = ir.Operation.create(
        "func.call",
        results=[reduction.results[0].type],
        operands=list(reduction.operands),
        attributes={
            "callee": ir.FlatSymbolRefAttr.get(name),
            "mhlo.frontend_attributes": ir.DictAttr.get({"inlineable": ir.StringAttr.get("false")}),
        },
        ip=ir.InsertionPoint(reduction),
    )
    reduction.results[0].replace_all_uses_with(call.result)
    inner = reduction.clone(ip=ir.InsertionPoint(block))
    for index, argument in enumerate(block.arguments):
        inner.operands[index] = argument
    ir.Operation.create("func.return", operands=[inner.results[0]], ip=ir.InsertionPoint(block))
    reduction.erase()
