"""jaxlib's MLIR bindings, which know StableHLO but nothing of torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

from dynaxla.forking import follow, keep_for_ever


class JaxMlir:
    """jaxlib's MLIR bindings, loaded."""

    def __init__(self) -> None:
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import chlo, sdy, stablehlo

        self.ir: Any = ir
        self._chlo: Any = chlo
        self._sdy: Any = sdy
        self.stablehlo: Any = stablehlo
        self.after_fork()  # the parent may have used JAX without this package
        follow(self)

    def after_fork(self) -> None:
        from jax._src.interpreters import mlir

        # Contexts verify modules on JAX's threads, which a forked child lacks.
        keep_for_ever(mlir.global_thread_pool)
        mlir.global_thread_pool = self.ir.ThreadPool()

    def context(self) -> Any:
        context = self.ir.Context()
        self._chlo.register_dialect(context)
        self.stablehlo.register_dialect(context)
        self._sdy.register_dialect(context)  # JAX annotates its LAPACK calls in it
        return context

    def load_artifact(self, context: Any, artifact: bytes) -> Any:
        return self.stablehlo.deserialize_portable_artifact(context, artifact)

    def bytecode(self, module: Any) -> bytes:
        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
        return stream.getvalue()

    def text(self, bytecode: bytes) -> str:
        """A module of bytecode, readable."""
        from jax.interpreters.mlir import make_ir_context  # knows func too, which else comes with an artifact

        return str(self.ir.Module.parse(bytecode, make_ir_context()))

    def symbol_name(self, operation: Any) -> str:
        return str(self.ir.StringAttr(operation.attributes["sym_name"]).value)

    def callee(self, operation: Any) -> str:
        """The function that a `func.call` calls."""
        return str(self.ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)


def walk(operation: Any) -> Iterator[Any]:
    """Every operation inside of one, outermost first."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from walk(inner.operation)


@cache
def load() -> JaxMlir:
    """Imports the bindings once per process."""
    return JaxMlir()


def artifact_version() -> str:
    """The StableHLO version both builds speak: what jaxlib reads, never above what torch-mlir writes."""
    return str(load().stablehlo.get_current_version())
