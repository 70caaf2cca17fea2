"""torch dialect -> StableHLO: torch-mlir's pass pipelines. Runs in the worker process, which has no torch.

Inputs and results are bytes. The result is pure StableHLO (with func, and the custom calls that `lowering.link`
resolves), as a portable artifact, which another build of MLIR can read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dynaxla.lowering.mlir_contexts import SharedContext

_PIPELINES = (
    (
        "torch backend",
        "builtin.module(func.func(torch-match-quantized-custom-ops),"
        "torchdynamo-export-to-torch-backend-pipeline{extra-library=})",
    ),
    ("stablehlo", "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})"),
)
_ALLOWED_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo"})


@dataclass(frozen=True, slots=True)
class LoweredModule:
    """Attributes:
    artifact: the StableHLO portable artifact.
    """

    artifact: bytes


@dataclass(frozen=True, slots=True)
class LoweringRejected:
    """torch-mlir rejected the module.

    Attributes:
        stage: "parse", "torch backend", "stablehlo" or "serialize".
        diagnostics: MLIR's diagnostics.
    """

    stage: str
    diagnostics: str


def lower(module: bytes, version: str) -> LoweredModule | LoweringRejected:
    """Lowers a serialized module of the torch dialect to StableHLO of the given version, such as "1.17.0", or of torch-mlir's
    own where that is older: a reader of artifacts reads older ones."""
    mlir = _load()
    context = mlir.context()
    stage = "parse"
    with context, mlir.ir.Location.unknown():
        try:
            parsed = mlir.ir.Module.parse(module)
            for stage, pipeline in _PIPELINES:  # noqa: B007 (the handler names it)
                mlir.PassManager.parse(pipeline).run(parsed.operation)
            stage = "serialize"
            if foreign := _purify(mlir.ir, parsed.operation):
                return LoweringRejected(stage, f"left over from lowering: {', '.join(sorted(foreign))}")
            return LoweredModule(mlir.serialize(parsed, version))
        except (mlir.ir.MLIRError, RuntimeError, ValueError) as error:
            return LoweringRejected(stage, str(error))


class _TorchMlirPasses:
    def __init__(self) -> None:
        from torch_mlir import ir
        from torch_mlir._mlir_libs import _stablehlo, _torchMlir
        from torch_mlir.passmanager import PassManager

        self.ir: Any = ir
        self.PassManager: Any = PassManager
        self.stablehlo: Any = _stablehlo
        self._torch: Any = _torchMlir
        self._shared = SharedContext(self._new_context)

    def context(self) -> Any:
        return self._shared.next_context()

    def serialize(self, module: Any, version: str) -> bytes:
        readable = self.stablehlo.get_smaller_version(version, self.stablehlo.get_current_version())
        return self.stablehlo.serialize_portable_artifact(module, readable)  # type: ignore[no-any-return]

    def _new_context(self) -> Any:
        context = self.ir.Context()
        self._torch.register_dialect(context)
        self.stablehlo.register_dialect(context)
        with context, self.ir.Location.unknown():
            # The Python bindings cannot load torch_c; a pass that depends on it does.
            empty = self.ir.Module.parse("func.func @main() {return}")
            self.PassManager.parse("builtin.module(torch-func-backend-type-conversion)").run(empty.operation)
        return context


@cache
def _load() -> _TorchMlirPasses:
    return _TorchMlirPasses()


def _purify(ir: Any, operation: Any) -> set[str]:
    """Converts arith constants to StableHLO constants (the TPU compiler takes one dialect). Returns the names of ops of other
    dialects."""
    foreign = set()
    for region in operation.regions:
        for block in region.blocks:
            for child in list(block.operations):
                inner = child.operation
                if inner.name == "arith.constant":
                    _replace_constant(ir, inner)
                    continue
                if inner.name.split(".")[0] not in _ALLOWED_DIALECTS:
                    foreign.add(inner.name)
                foreign |= _purify(ir, inner)
    return foreign


def _replace_constant(ir: Any, constant: Any) -> None:
    made = ir.Operation.create(
        "stablehlo.constant",
        results=[constant.results[0].type],
        attributes={"value": constant.attributes["value"]},
        ip=ir.InsertionPoint(constant),
    )
    constant.results[0].replace_all_uses_with(made.results[0])
    constant.erase()
