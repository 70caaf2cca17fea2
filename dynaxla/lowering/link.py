"""StableHLO from torch-mlir + functions lowered by JAX -> one pure StableHLO module, ready for any PJRT compiler.

This is where the two MLIR builds meet: torch-mlir's side arrives as a portable artifact (bytes), never as text or objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaxla.errors import LinkError
from dynaxla.lowering.importer import RULE_PREFIX, RuleCall
from dynaxla.runtime.pjrt import cpu_client
from dynaxla.specs import TensorSpec

Rule = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class LinkedModule:
    """A linked module.

    Attributes:
        bytecode: MLIR bytecode of pure StableHLO, which `Client.compile` takes.
        text: the same, readable.
    """

    bytecode: bytes
    text: str


class Linker:
    """Links rule calls into modules; holds the functions JAX has lowered, one per distinct call and platform."""

    def __init__(self, rules: Mapping[Any, Rule]) -> None:
        self._rules = rules
        self._lowered: dict[tuple[str, str], bytes] = {}

    def link(
        self, artifact: bytes, calls: Mapping[str, RuleCall], platform: str, precision: str | None
    ) -> LinkedModule:
        """Replaces every `dynaxla.` custom call of the artifact by a call of its rule's function.

        Args:
            artifact: a StableHLO portable artifact.
            calls: the rule call behind each custom-call target.
            platform: JAX's name of the platform to lower for: "cpu", "cuda" or "tpu".
            precision: precision of float32 products: "DEFAULT", "HIGH" or "HIGHEST"; None leaves them alone.

        Raises:
            LinkError: a rule's result differs from torch's in shape or dtype, or a custom call has no rule.
        """
        mlir = _jax_mlir()
        context = mlir.context()
        with context, mlir.ir.Location.unknown():
            module = mlir.load_artifact(context, artifact)
            table = mlir.ir.SymbolTable(module.operation)
            for symbol, call in calls.items():
                self._insert(mlir, context, module, table, symbol, self._lower(call, platform))
            for operation in list(_walk(module.operation)):
                _link_operation(mlir, operation, precision, platform)
            module.operation.verify()
            return LinkedModule(mlir.bytecode(module), str(module))

    def _lower(self, call: RuleCall, platform: str) -> bytes:
        key = (platform, call.key)
        found = self._lowered.get(key)
        if found is None:
            found = self._lowered[key] = _lower_rule(self._rules[call.target], call, platform)
        return found

    def _insert(self, mlir: JaxMlir, context: Any, module: Any, table: Any, symbol: str, lowered: bytes) -> None:
        """Copies the functions of a lowered rule into `module` under names that start with the symbol."""
        source = mlir.ir.Module.parse(lowered, context)
        functions = list(source.body.operations)
        names = {mlir.symbol_name(f): _function_name(symbol, mlir.symbol_name(f)) for f in functions}
        for function in functions:
            copy = function.operation.clone()
            module.body.append(copy)
            copy.attributes["sym_name"] = mlir.ir.StringAttr.get(names[mlir.symbol_name(function)])
            copy.attributes["sym_visibility"] = mlir.ir.StringAttr.get("private")
            for attribute in ("arg_attrs", "res_attrs"):
                if attribute in copy.attributes:
                    del copy.attributes[attribute]
            for operation in _walk(copy):
                if operation.name == "func.call":
                    callee = mlir.ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                    operation.attributes["callee"] = mlir.ir.FlatSymbolRefAttr.get(names[callee])


class JaxMlir:
    """jaxlib's MLIR bindings, loaded."""

    def __init__(self) -> None:
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import chlo, sdy, stablehlo

        self.ir: Any = ir
        self._chlo: Any = chlo
        self._sdy: Any = sdy
        self.stablehlo: Any = stablehlo

    def context(self) -> Any:
        context = self.ir.Context()
        self._chlo.register_dialect(context)
        self.stablehlo.register_dialect(context)
        self._sdy.register_dialect(context)  # JAX annotates its LAPACK calls in it
        return context

    def load_artifact(self, context: Any, artifact: bytes) -> Any:
        return self.stablehlo.deserialize_portable_artifact(context, artifact)

    def bytecode(self, module: Any) -> bytes:
        import io

        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
        return stream.getvalue()

    def symbol_name(self, operation: Any) -> str:
        return str(self.ir.StringAttr(operation.attributes["sym_name"]).value)


@cache
def _jax_mlir() -> JaxMlir:
    return JaxMlir()


def artifact_version() -> str:
    """The StableHLO version both builds speak: what jaxlib reads, never above what torch-mlir writes."""
    from jax.extend.mlir.dialects import stablehlo

    return str(stablehlo.get_current_version())


def _function_name(symbol: str, name: str) -> str:
    base = symbol.removeprefix(RULE_PREFIX)
    return base if name == "main" else f"{base}_{name}"


def _walk(operation: Any) -> Any:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)


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
    if not target.startswith(RULE_PREFIX):
        return
    call = mlir.ir.Operation.create(
        "func.call",
        results=[result.type for result in operation.results],
        operands=list(operation.operands),
        attributes={"callee": mlir.ir.FlatSymbolRefAttr.get(_function_name(target, "main"))},
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


def _lower_rule(rule: Rule, call: RuleCall, platform: str) -> bytes:
    """One rule, lowered by JAX for one platform, as MLIR bytecode."""
    import jax

    from dynaxla.lowering.jax_rules.rule_set import JNP_DTYPES

    def body(*operands: Any) -> list[Any]:
        given = iter(operands)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, call.treespec)
        produced = rule(*args, **kwargs)
        results = list(produced) if isinstance(produced, (tuple, list)) else [produced]
        return [r for r, spec in zip(results, call.results, strict=True) if spec is not None]

    operands = [jax.ShapeDtypeStruct(s.shape, JNP_DTYPES[s.dtype]) for s in call.leaves if isinstance(s, TensorSpec)]
    # Without a default device, lowering would start the user's JAX backends; on a GPU that takes most of its memory.
    with jax.enable_x64(True), jax.default_device(cpu_client().device):
        traced = jax.jit(body, keep_unused=True).trace(*operands)
        _check_results(call, traced.out_info)
        lowered = traced.lower(lowering_platforms=(platform,))
        return _jax_mlir().bytecode(lowered.compiler_ir("stablehlo"))


def _check_results(call: RuleCall, infos: list[Any]) -> None:
    expected = [spec for spec in call.results if spec is not None]
    for index, (info, spec) in enumerate(zip(infos, expected, strict=True)):
        if tuple(info.shape) != spec.shape or str(info.dtype) != _jax_name(spec.dtype):
            raise LinkError(
                explanation=f"the JAX rule of {call.target} gives {info.dtype}{list(info.shape)} as result {index}, "
                f"torch gives {spec}",
                hint="the rule is at fault; report it, or refuse the call in the op's row",
                op=str(call.target),
            )


def _jax_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
