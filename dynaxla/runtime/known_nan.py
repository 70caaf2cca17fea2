"""Keeps NaN that XLA's CPU compiler knows while it compiles, such as that of `x * nan`.

Its exponential converts a part of the argument to an integer, and LLVM leaves open what that gives for NaN. Where the argument
is NaN at compile time, the result becomes whatever memory holds. A NaN that is met while a program runs does no harm.

Imports no torch, as compiling child processes use it.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from dynaxla.runtime.executable_info import COMPUTATION, find_instructions

if TYPE_CHECKING:
    from dynaxla.runtime.xla import MlirBindings

Operation = Any  # of jaxlib's bindings of MLIR, which have no types

_NAN = re.compile(r"\bnan\b")
_EXPONENTIAL = re.compile(r" (?:exponential|exponential-minus-one|logistic)\(")
_PARTIAL = frozenset(("log", "log-plus-one", "sqrt", "rsqrt"))
"""Functions that are NaN of negative numbers."""
_EXPONENTIALS = frozenset("stablehlo.exponential stablehlo.exponential_minus_one stablehlo.logistic".split())


def loses_nan(hlo: str) -> bool:
    """Whether a computation has an exponential, and a NaN that is known: a constant, or the logarithm or root of numbers made
    of nothing but constants and indices, which LLVM computes where few elements are.

    Args:
        hlo: the text of an optimized module, as `HloPrintOptions.short_parsable` prints it, without large constants.
    """
    return any(_EXPONENTIAL.search(each) and _knows_nan(each) for _, each in COMPUTATION.findall(hlo))


def _knows_nan(computation: str) -> bool:
    known = set[str]()
    for each in find_instructions(computation):
        operands = each.operands.split(", ")
        if each.opcode in ("constant", "iota") or known.issuperset(operands):
            known.add(each.name)
            if each.opcode in _PARTIAL or (each.opcode == "constant" and _NAN.search(each.operands + each.attributes)):
                return True
    return False


def guard_exponentials(bindings: MlirBindings, module: bytes | str) -> bytes:
    """A StableHLO module (bytecode or text) as bytecode, in which exponentials of NaN are chosen to be NaN.

    The choice makes a softmax slower by half, so that only programs get it which need it.
    """
    with bindings.full_context():
        parsed, found = bindings.ir.Module.parse(module), list[Operation]()

        def keep(operation: Operation) -> Any:
            if _may_be_exponential(operation):
                found.append(operation)
            return bindings.ir.WalkResult.ADVANCE

        parsed.operation.walk(keep)
        for operation in found:
            with operation.location:
                _guard(bindings, operation)
        stream = io.BytesIO()
        parsed.operation.write_bytecode(stream)
        return stream.getvalue()


def _may_be_exponential(operation: Operation) -> bool:
    """Whether an operation is an exponential, or may become one: XLA writes functions of CHLO, such as sinh, by means of it."""
    if operation.name in _EXPONENTIALS:
        return True
    types = [value.type for value in (*operation.operands, *operation.results)]
    return bool(operation.name.startswith("chlo.") and len(types) == 2 and types[0] == types[1])


def _guard(bindings: MlirBindings, operation: Operation) -> None:
    ir = bindings.ir
    (argument,), (result,) = operation.operands, operation.results
    type_ = ir.RankedTensorType(result.type)
    flags = ir.RankedTensorType.get(type_.shape, ir.IntegerType.get_signless(1))
    differs = bindings.stablehlo.ComparisonDirectionAttr.get("NE")
    at = ir.InsertionPoint.after(operation)
    is_nan = ir.Operation.create(
        "stablehlo.compare", [flags], [argument, argument], attributes={"comparison_direction": differs}, ip=at
    )
    nan = ir.Operation.create("stablehlo.constant", [type_], attributes={"value": _splat_of_nan(ir, type_)}, ip=at)
    chosen = ir.Operation.create("stablehlo.select", [type_], [is_nan.result, nan.result, result], ip=at)
    result.replace_all_uses_except(chosen.result, chosen)


def _splat_of_nan(ir: Any, type_: Any) -> Any:
    """A constant of NaN; of a complex number both parts are."""
    return ir.Attribute.parse(f"dense<{_written_nan(ir, type_.element_type)}> : {type_}")


def _written_nan(ir: Any, element: Any) -> str:
    if isinstance(element, ir.ComplexType):
        part = _written_nan(ir, ir.ComplexType(element).element_type)
        return f"({part}, {part})"
    return {"bf16": "0x7FC0", "f16": "0x7E00", "f32": "0x7FC00000", "f64": "0x7FF8000000000000"}[str(element)]
