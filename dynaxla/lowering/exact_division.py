"""Keeps XLA from rewriting divisions whose last bit a later op depends on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dynaxla.custom_ops.constrain import IN_REGION
from dynaxla.lowering.stablehlo_module import StablehloModules, walk
from dynaxla.runtime.executable_info import ANY_LAST_BIT, FRONTEND_ATTRIBUTES

# Of jaxlib's bindings of MLIR, which have no types.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Value: TypeAlias = Any
Type: TypeAlias = Any

_STEPS = frozenset(
    "stablehlo.floor stablehlo.ceil stablehlo.round_nearest_afz stablehlo.round_nearest_even stablehlo.compare "
    "stablehlo.sign stablehlo.remainder stablehlo.divide".split()
)
"""Ops whose results change much if an operand changes by its last bit; and division, as XLA merges two divisions."""

_PASSES_ON = frozenset(
    "stablehlo.abs stablehlo.add stablehlo.subtract stablehlo.multiply stablehlo.negate stablehlo.maximum stablehlo.minimum "
    "stablehlo.clamp stablehlo.select stablehlo.reshape stablehlo.broadcast_in_dim stablehlo.transpose stablehlo.slice "
    "stablehlo.dynamic_slice stablehlo.gather stablehlo.concatenate stablehlo.pad stablehlo.reverse stablehlo.convert".split()
)
"""Elementwise and data movement ops: a step op after them depends on the same last bit. Sums, matrix products and
logarithms are
not among them: their own rounding differs between eager and XLA in any case."""


@dataclass(frozen=True, slots=True)
class DivisionFlow:
    """Which operands and quotients of a function reach step ops or results, through elementwise and data movement ops alone.

    Attributes:
        stepped: indices of the operands that reach a step op.
        passed: per operand, the indices of the results that it reaches.
        quotients: indices of the results that a quotient reaches without reaching a step op.
    """

    stepped: frozenset[int]
    passed: Sequence[frozenset[int]]
    quotients: frozenset[int]


NOWHERE = DivisionFlow(frozenset(), (), frozenset())
"""The flow of a function that is not analyzed."""


def trace_divisions(mlir: StablehloModules, module: Module) -> DivisionFlow:
    """Analyzes the first function of a module, which calls the others."""
    calls = _Calls(mlir, module)
    arguments = [calls.find_reached(value) for value in calls.first.regions[0].blocks[0].arguments]
    quotients = [calls.find_reached(one.results[0]) for one in _divisions(mlir, module)]
    return DivisionFlow(
        frozenset(i for i, results in enumerate(arguments) if results is None),
        tuple(results or frozenset() for results in arguments),
        frozenset().union(*(results for results in quotients if results is not None)),
    )


def veil_by_replica(text: str) -> str:
    """The text of a function for a program on a mesh, where a partition's number is no zero, and that of the one replica is."""
    return text.replace("stablehlo.partition_id ", "stablehlo.replica_id ")


def keep_divisions(mlir: StablehloModules, module: Module, *, returned: bool) -> None:
    """Keeps XLA from rewriting float divisions whose quotient may reach a step op or, with `returned`, the function's result.

    XLA makes `x / 41` a product with the reciprocal, in which 41 / 41 is less than 1, so that `floor`, comparisons and
    conversions to integers are off by one; and it rewrites `(a / b) / c` to `a / (b * c)`, which overflows. The bits of such
    divisors and quotients are combined by `or` with zeros that XLA cannot prove to be zero. Other divisions are left to XLA:
    the rewrites make a softmax faster.
    """
    calls = _Calls(mlir, module)
    for division in _divisions(mlir, module):
        results = calls.find_reached(division.results[0])
        if results is None or (returned and results):
            with division.location:
                _veil(mlir, division)


def _divisions(mlir: StablehloModules, module: Module) -> list[Operation]:
    found = (operation for operation in walk(module.operation) if operation.name == "stablehlo.divide")
    return [division for division in found if _is_float(mlir, division) and not _is_free(division)]


def _is_free(division: Operation) -> bool:
    """Whether the body that divides needs no last bit, see `ANY_LAST_BIT`."""
    return FRONTEND_ATTRIBUTES in division.attributes and ANY_LAST_BIT in division.attributes[FRONTEND_ATTRIBUTES]


def _is_float(mlir: StablehloModules, operation: Operation) -> bool:
    ir = mlir.ir
    element = ir.RankedTensorType(operation.results[0].type).element_type
    return isinstance(element, (ir.BF16Type, ir.F16Type, ir.F32Type, ir.F64Type))


class _Calls:
    """Follows values through a module and the calls of its functions."""

    def __init__(self, mlir: StablehloModules, module: Module) -> None:
        self._mlir = mlir
        self.first: Operation = next(iter(module.body.operations))
        self._functions: Mapping[str, Operation] = {mlir.symbol_name(f): f for f in module.body.operations}
        self._sites: dict[str, list[Operation]] = {}
        for operation in walk(module.operation):
            if operation.name == "func.call":
                self._sites.setdefault(mlir.callee(operation), []).append(operation)

    def find_reached(self, start: Value) -> frozenset[int] | None:
        """The results of the first function that a value reaches; None if it reaches a step op or an op with a region."""
        pending, seen, results = [start], set(), set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            for use in value.uses:
                user = use.owner
                if self._is_step(user):
                    return None
                if user.name == "func.return" and not self._sites.get(self._function_of(user)):
                    results.add(use.operand_number)
                pending.extend(self._next(user, use.operand_number))
        return frozenset(results)

    def _is_step(self, user: Operation) -> bool:
        name = user.name
        if name == "stablehlo.convert":
            return isinstance(
                self._mlir.ir.RankedTensorType(user.results[0].type).element_type, self._mlir.ir.IntegerType
            )
        return name in _STEPS or name in ("stablehlo.return", "stablehlo.while", "stablehlo.case", "stablehlo.if")

    def _next(self, user: Operation, position: int) -> Iterator[Value]:
        """The results of a user op that its operand reaches."""
        if user.name == "func.call":
            yield self._functions[self._mlir.callee(user)].regions[0].blocks[0].arguments[position]
        elif user.name == "func.return":
            yield from (site.results[position] for site in self._sites.get(self._function_of(user), ()))
        elif user.name in _PASSES_ON or self._mlir.custom_target(user) == IN_REGION:
            yield from user.results

    def _function_of(self, operation: Operation) -> str:
        return self._mlir.symbol_name(operation.parent)


def _veil(mlir: StablehloModules, division: Operation) -> None:
    """Combines the bits of the divisor and of the quotient with zeros, one per element.

    A zero is the bitwise `and` of an element's index and the partition's number, which is 0 when the program runs. If all
    elements shared one zero, XLA would move it out of the elementwise operations, and the reciprocal with it.
    """
    ir = mlir.ir
    type_ = ir.RankedTensorType(division.results[0].type)
    width = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}[str(type_.element_type)]
    integer = ir.IntegerType.get_unsigned(width)
    bits, line = (ir.RankedTensorType.get(sizes, integer) for sizes in (type_.shape, [math.prod(type_.shape)]))
    scalar, partition = (ir.RankedTensorType.get([], ir.IntegerType.get_unsigned(each)) for each in (width, 32))

    def make(name: str, result: Type, *operands: Value, **attributes: object) -> Value:
        at = ir.InsertionPoint(division)
        return ir.Operation.create(f"stablehlo.{name}", [result], operands, attributes=attributes, ip=at).results[0]

    def veiled(value: Value) -> Value:
        return make("bitcast_convert", type_, make("or", bits, make("bitcast_convert", bits, value), zeros))

    zero = make("convert", scalar, make("partition_id", partition))
    zeros = make("broadcast_in_dim", bits, zero, broadcast_dimensions=ir.DenseI64ArrayAttr.get([]))
    if type_.rank:
        first = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)
        zeros = make("and", bits, zeros, make("reshape", bits, make("iota", line, iota_dimension=first)))
    dividend, divisor = division.operands
    division.results[0].replace_all_uses_with(veiled(make("divide", type_, dividend, veiled(divisor))))
    division.erase()
