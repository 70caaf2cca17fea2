"""StableHLO functions of calls, each a separate text; programs are linked from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from dynaxla.lowering.call_graph import OpCall, mlir_type
from dynaxla.lowering.cpu_products import has_products, settle_products
from dynaxla.lowering.cpu_reductions import SHIFTED, carry_nan, has_reductions, keep_reductions_apart
from dynaxla.lowering.exact_division import NOWHERE, DivisionFlow, keep_divisions, trace_divisions, veil_by_replica
from dynaxla.lowering.product_factors import ProductFactor
from dynaxla.lowering.stablehlo_module import StablehloModules, strip_locations, walk
from dynaxla.torch_api.overloads import REGIONS, namespace

# Of jaxlib's bindings of MLIR, which have no types.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Value: TypeAlias = Any

FunctionKey: TypeAlias = tuple[str, str | None, str]
"""A platform, a precision, and the key of a call."""

_FEW_ROWS = 8
"""Of a product: a TPU's sublanes."""
_KEEPS_NUMBERS = frozenset(
    f"stablehlo.{name}" for name in ("convert", "transpose", "reshape", "reverse", "broadcast_in_dim")
)
"""Operations whose results have elements of their first operand, which may be widened."""


@dataclass(frozen=True, slots=True)
class StablehloFunction:
    """The StableHLO function of a call, as MLIR text.

    Attributes:
        name: its symbol.
        text: the function and the private functions that it calls, whose names begin with its own. That of a call with
            sub-graphs says which nodes of these its operations compute (`locations.SCOPE`).
        exact: the variant with exact divisions, for results whose last bit matters; its symbol is `exact_name`.
        flow: which of its operands and quotients reach step ops or results.
        unfinished: the text before the steps that depend on sizes; empty if there are none.
    """

    name: str
    text: str
    exact: str
    flow: DivisionFlow
    unfinished: str = ""

    @property
    def exact_name(self) -> str:
        return f"{self.name}.exact"


@dataclass(frozen=True, slots=True)
class FunctionFinisher:
    """Finishes the functions that torch-mlir and JAX lowered.

    Attributes:
        mlir: jaxlib's MLIR.
        platform: the platform to lower for, by JAX's name: "cpu", "cuda" or "tpu".
        precision: of float32 products: "DEFAULT", "HIGH" or "HIGHEST"; None leaves them alone.
    """

    mlir: StablehloModules
    platform: str
    precision: str | None

    def finish(
        self, module: Module, symbol: str, call: OpCall, *, is_for_mesh: bool = False
    ) -> StablehloFunction | None:
        """Finishes the function of a call in a module. Returns None if its type does not match torch's tensors.

        Args:
            is_for_mesh: whether programs over several devices call it, whose collectives apply its reducers, too.
        """
        functions = {self.mlir.symbol_name(f): f for f in module.body.operations}
        if not self._has_type(functions[symbol], call):
            return None
        with module.context, self.mlir.ir.Location.unknown():
            plain = self._alone(functions, symbol, call.name)
            if self.platform != "cpu":
                return StablehloFunction(call.name, _text(plain, call), "", NOWHERE)
            unfinished = _text(plain, call) if has_reductions(plain) or has_products(plain) else ""
            flow = trace_divisions(self.mlir, plain)
            keep_divisions(self.mlir, plain, returned=False)
            self._settle_sizes(plain, call, is_for_mesh)
            if not flow.quotients:
                return StablehloFunction(call.name, _text(plain, call), "", flow, unfinished)
            exact = self._alone(functions, symbol, f"{call.name}.exact")
            keep_divisions(self.mlir, exact, returned=True)
            self._settle_sizes(exact, call, is_for_mesh)
            return StablehloFunction(call.name, _text(plain, call), _text(exact, call), flow, unfinished)

    def _settle_sizes(self, module: Module, call: OpCall, is_for_mesh: bool) -> None:
        """Rewrites what XLA's CPU compiler computes well or badly by its size."""
        settle_products(self.mlir, module, by_rows=not is_for_mesh)
        if is_for_mesh:
            carry_nan(self.mlir, module)
        else:
            keep_reductions_apart(self.mlir, module, drops_nan=call.target in SHIFTED)

    def finish_text(self, unfinished: str, call: OpCall) -> StablehloFunction | None:
        """Finishes the function of a call from its unfinished text."""
        return self.finish(self.mlir.parse(f"module {{\n{unfinished}\n}}"), call.name, call)

    def finish_for_mesh(self, function: StablehloFunction, call: OpCall) -> StablehloFunction:
        """The function as a program over several devices takes it: with plain reducers, which collectives apply, too.

        What the library would compute otherwise than XLA, `runtime/xla.py` finds in the compiled program.
        """
        if function.unfinished:
            module = self.mlir.parse(f"module {{\n{function.unfinished}\n}}")
            function = self.finish(module, call.name, call, is_for_mesh=True) or function
        return replace(function, text=veil_by_replica(function.text), exact=veil_by_replica(function.exact))

    def _has_type(self, function: Operation, call: OpCall) -> bool:
        type_ = self.mlir.ir.FunctionType(self.mlir.ir.TypeAttr(function.attributes["function_type"]).value)
        found = [str(one) for one in (*type_.inputs, *type_.results)]
        return found == [mlir_type(spec) for spec in (*call.operands, *call.tensors)]

    def _alone(self, functions: Mapping[str, Operation], symbol: str, name: str) -> Module:
        """Makes a module of one function, renamed, and the functions that it calls."""
        module = self.mlir.ir.Module.create()
        pending, names = [symbol], {symbol: name}
        while pending:
            copy = self._copy(functions[pending[-1]], names[pending.pop()], module)
            for operation in walk(copy):
                if operation.name == "func.call":
                    callee = self.mlir.callee(operation)
                    if callee not in names:
                        names[callee] = (
                            f"{name}.{len(names)}"  # not its own name, which the rest of the module bears on
                        )
                        pending.append(callee)
                    operation.attributes["callee"] = self.mlir.ir.FlatSymbolRefAttr.get(names[callee])
        for operation in list(walk(module.operation)):
            with operation.location:
                self._rewrite(operation)
        return module

    def _copy(self, function: Operation, name: str, target: Module) -> Operation:
        ir = self.mlir.ir
        copy = function.operation.clone()
        target.body.append(copy)
        copy.attributes["sym_name"] = ir.StringAttr.get(name)
        copy.attributes["sym_visibility"] = ir.StringAttr.get("private")
        for attribute in ("arg_attrs", "res_attrs"):
            if attribute in copy.attributes:
                del copy.attributes[attribute]
        return copy

    def _rewrite(self, operation: Operation) -> None:
        name = operation.name
        if name == "stablehlo.convert":
            self._convert_through_integers(operation)
        if name in ("stablehlo.dot_general", "stablehlo.convolution"):
            self._set_precision(operation)

    def _set_precision(self, operation: Operation) -> None:
        """Sets the precision of a product or a convolution.

        That of bfloat16 factors is one pass of a TPU's matrix unit at every precision, but XLA's TPU compiler fuses into a
        product what makes its factors, a softmax or a product before it, only at the precision "default". With few rows it does
        better at the other ones.
        """
        is_exact = (
            self.platform == "tpu" and all(map(self._is_bfloat16, operation.operands)) and self._has_rows(operation)
        )
        precision = "DEFAULT" if is_exact else self.precision
        if precision is not None:
            wanted = self.mlir.stablehlo.PrecisionAttr.get(precision)
            operation.attributes["precision_config"] = self.mlir.ir.ArrayAttr.get([wanted, wanted])

    def _has_rows(self, operation: Operation) -> bool:
        """Whether both factors of a product have more rows than a step of a decoder has; a convolution does."""
        if operation.name != "stablehlo.dot_general":
            return True
        return min(factor.count_rows(self.mlir) for factor in ProductFactor.both(self.mlir, operation)) > _FEW_ROWS

    def _is_bfloat16(self, value: Value) -> bool:
        """Whether all elements of a value are bfloat16 numbers, also where they were widened and moved."""
        while (element := str(self.mlir.ir.RankedTensorType(value.type).element_type)) in ("f32", "f64"):
            source = getattr(value.owner, "operation", None)  # None: an argument's owner is a block
            if source is None or source.name not in _KEEPS_NUMBERS:
                return False
            value = source.operands[0]
        return element == "bf16"

    def _convert_through_integers(self, operation: Operation) -> None:
        """Converts bools to floats by way of integers.

        XLA turns `convert(mask) * x` into `select(mask, x, 0)`, which is 0 and not NaN where x is NaN or infinite; it does
        so behind its own rewrite of `convert(mask) / 0` to a product, too. It knows only the direct conversion.
        """
        ir = self.mlir.ir
        source, result = (ir.RankedTensorType(value.type) for value in (operation.operands[0], operation.results[0]))
        if source.element_type == ir.IntegerType.get_signless(1) and not isinstance(
            result.element_type, ir.IntegerType
        ):
            integer = ir.IntegerType.get_signless(32)
            operation.operands[0] = self._converted(operation.operands[0], integer, operation)

    def _converted(self, value: Value, element: Any, user: Operation) -> Value:
        """Converts a value's element type, in front of the operation that uses it."""
        ir = self.mlir.ir
        type_ = ir.RankedTensorType.get(ir.RankedTensorType(value.type).shape, element)
        at = ir.InsertionPoint(user)
        return ir.Operation.create("stablehlo.convert", results=[type_], operands=[value], ip=at).results[0]


def _text(module: Module, call: OpCall) -> str:
    """The functions of a module. Locations are unknown, as those of the calls of a function say where it is from, or name the
    nodes of the call's sub-graphs."""
    module.operation.verify()
    strip_locations(module, keeps_scopes=namespace(call.target) == REGIONS)
    return "\n".join(f.get_asm(enable_debug_info=True, use_local_scope=True) for f in module.body.operations)
