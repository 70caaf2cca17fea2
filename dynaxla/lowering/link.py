"""StableHLO from torch-mlir + functions lowered by JAX -> one pure StableHLO module, ready for any PJRT compiler.

This is where the two MLIR builds meet: torch-mlir's side arrives as a portable artifact (bytes), never as text or objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaxla.lowering import jax_mlir
from dynaxla.lowering.bodies import Body, BodyFunctions
from dynaxla.lowering.division import keep_divisions
from dynaxla.lowering.importer import BODY_PREFIX, BodyCall
from dynaxla.lowering.jax_mlir import JaxMlir, walk


@dataclass(frozen=True, slots=True)
class LinkedModule:
    """A linked module.

    Attributes:
        bytecode: MLIR bytecode of pure StableHLO, which `Client.compile` takes.
    """

    bytecode: bytes

    @property
    def text(self) -> str:
        """The same, readable."""
        return jax_mlir.load().text(self.bytecode)


class Linker:
    """Links calls of bodies into modules."""

    def __init__(self, bodies: Mapping[Any, Body], functions: BodyFunctions | None = None) -> None:
        self._functions = BodyFunctions(bodies) if functions is None else functions

    def using(self, bodies: Mapping[Any, Body]) -> Linker:
        """A linker for these bodies; both hold one store of lowered functions."""
        return Linker(bodies, self._functions.using(bodies))

    def link(
        self, artifact: bytes, calls: Mapping[str, BodyCall], platform: str, precision: str | None
    ) -> LinkedModule:
        """Replaces every `dynaxla.` custom call of the artifact by a call of its body's function.

        Args:
            artifact: a StableHLO portable artifact.
            calls: the call of a body behind each custom-call target.
            platform: JAX's name of the platform to lower for: "cpu", "cuda" or "tpu".
            precision: precision of float32 products: "DEFAULT", "HIGH" or "HIGHEST"; None leaves them alone.

        Raises:
            LinkError: a body's result differs from torch's in shape or dtype, or a custom call has no body.
        """
        bodies = self._functions.of(list(calls.values()), platform)
        mlir = jax_mlir.load()
        context = mlir.context()
        with context, mlir.ir.Location.unknown():
            module = mlir.load_artifact(context, artifact)
            parsed = {body.module: _Source(mlir, context, body.module) for body in bodies}
            for symbol, body in zip(calls, bodies, strict=True):
                parsed[body.module].copy(body.name, _function_name(symbol), module)
            for operation in list(walk(module.operation)):
                _link_operation(mlir, operation, precision, platform)
            if platform == "cpu":
                keep_divisions(mlir, module)
            module.operation.verify()
            return LinkedModule(mlir.bytecode(module))


class _Source:
    """The functions of a lowered module, to be copied from."""

    def __init__(self, mlir: JaxMlir, context: Any, bytecode: bytes) -> None:
        self._mlir = mlir
        self._module = mlir.ir.Module.parse(bytecode, context)
        self._functions = {mlir.symbol_name(f): f for f in self._module.body.operations}

    def copy(self, name: str, new_name: str, target: Any) -> None:
        """Puts a function, and those it calls, into another module; all their names start with the new one."""
        pending, names = [name], {name: new_name}
        while pending:
            copy = self._copy_one(pending.pop(), names, target)
            for operation in walk(copy):
                if operation.name == "func.call":
                    callee = self._mlir.callee(operation)
                    if callee not in names:
                        names[callee] = f"{new_name}_{callee}"
                        pending.append(callee)
                    operation.attributes["callee"] = self._mlir.ir.FlatSymbolRefAttr.get(names[callee])

    def _copy_one(self, name: str, names: Mapping[str, str], target: Any) -> Any:
        ir = self._mlir.ir
        copy = self._functions[name].operation.clone()
        target.body.append(copy)
        copy.attributes["sym_name"] = ir.StringAttr.get(names[name])
        copy.attributes["sym_visibility"] = ir.StringAttr.get("private")
        for attribute in ("arg_attrs", "res_attrs"):
            if attribute in copy.attributes:
                del copy.attributes[attribute]
        return copy


def _function_name(symbol: str) -> str:
    return symbol.removeprefix(BODY_PREFIX)


def _link_operation(mlir: JaxMlir, operation: Any, precision: str | None, platform: str) -> None:
    name = operation.name  # a linked call is gone afterwards
    if name == "stablehlo.custom_call":
        _link_call(mlir, operation)
    elif name == "stablehlo.convert":
        _convert_through_integers(mlir, operation)
    elif name == "stablehlo.dot_general" and platform == "cpu":
        _widen_factors(mlir, operation)
    if precision is not None and name in ("stablehlo.dot_general", "stablehlo.convolution"):
        wanted = mlir.stablehlo.PrecisionAttr.get(precision)
        operation.attributes["precision_config"] = mlir.ir.ArrayAttr.get([wanted, wanted])


def _link_call(mlir: JaxMlir, operation: Any) -> None:
    target = mlir.ir.StringAttr(operation.attributes["call_target_name"]).value
    if not target.startswith(BODY_PREFIX):
        return
    call = mlir.ir.Operation.create(
        "func.call",
        results=[result.type for result in operation.results],
        operands=list(operation.operands),
        attributes={"callee": mlir.ir.FlatSymbolRefAttr.get(_function_name(target))},
        ip=mlir.ir.InsertionPoint(operation),
    )
    for old, new in zip(operation.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    operation.erase()


def _convert_through_integers(mlir: JaxMlir, operation: Any) -> None:
    """Takes a conversion of bools to floats through integers.

    XLA turns `convert(mask) * x` into `select(mask, x, 0)`, which is 0 and not NaN where x is NaN or infinite; it does
    so behind its own rewrite of `convert(mask) / 0` to a product, too. It knows only the direct conversion.
    """
    ir = mlir.ir
    source, result = (ir.RankedTensorType(value.type) for value in (operation.operands[0], operation.results[0]))
    integer = ir.IntegerType.get_signless(32)
    if source.element_type != ir.IntegerType.get_signless(1) or isinstance(result.element_type, ir.IntegerType):
        return
    operation.operands[0] = _converted(mlir, operation.operands[0], integer, operation)


def _widen_factors(mlir: JaxMlir, operation: Any) -> None:
    """Converts the 16-bit factors of a product that is summed in a wider float.

    XLA's CPU client compiles such a product and then cannot run it where the factors do not lie as its fast kernels
    want them ("DotThunk: BF16 x BF16 = F32"). Products of weights, which lie well, take as long either way.
    """
    wide = mlir.ir.RankedTensorType(operation.results[0].type).element_type
    for index, factor in enumerate(operation.operands):
        element = mlir.ir.RankedTensorType(factor.type).element_type
        if element != wide and str(element) in ("bf16", "f16"):
            operation.operands[index] = _converted(mlir, factor, wide, operation)


def _converted(mlir: JaxMlir, value: Any, element: Any, user: Any) -> Any:
    """The value with elements of another type, made in front of the operation that uses it."""
    made = mlir.ir.Operation.create(
        "stablehlo.convert",
        results=[mlir.ir.RankedTensorType.get(mlir.ir.RankedTensorType(value.type).shape, element)],
        operands=[value],
        ip=mlir.ir.InsertionPoint(user),
    )
    return made.results[0]
