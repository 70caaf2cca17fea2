"""The only importer of torch_mlir in the user's process: the FX importer.

It is Python over MLIR's builders and safe to run here; the pass pipelines, which can abort, run in a child process
(`lowering.worker`).
"""

from __future__ import annotations

import io
from typing import Any

from dynaxla.isolation.once import once
from dynaxla.lowering.mlir_contexts import SharedContext


class TorchMlir:
    """The parts of torch_mlir that the importer uses."""

    def __init__(self) -> None:
        from torch_mlir import ir
        from torch_mlir._mlir_libs import _stablehlo
        from torch_mlir.dialects import torch as torch_dialect
        from torch_mlir.extras import fx_importer
        from torch_mlir.passmanager import PassManager

        self.ir = ir
        self.fx_importer: Any = fx_importer
        self._torch_dialect = torch_dialect
        self._stablehlo = _stablehlo
        self._pass_manager = PassManager
        self._shared = SharedContext(self._new_context)

    def context(self) -> Any:
        """Makes a context with the torch, torch_c and stablehlo dialects, for one module. Not safe from several
        threads at once."""
        return self._shared.next_context()

    def _new_context(self) -> Any:
        context = self.ir.Context()
        context.enable_multithreading(False)  # a forked child would wait for its threads
        self._torch_dialect.register_dialect(context)
        self._stablehlo.register_dialect(context)
        with context, self.ir.Location.unknown():
            # The Python bindings cannot load torch_c; a pass that depends on it does.
            empty = self.ir.Module.parse("func.func @main() {return}")
            self._pass_manager.parse("builtin.module(torch-func-backend-type-conversion)").run(empty.operation)
        return context

    def bytecode(self, operation: Any) -> bytes:
        stream = io.BytesIO()
        operation.write_bytecode(stream)
        return stream.getvalue()

    def text(self, bytecode: bytes) -> str:
        """A module of bytecode, readable."""
        return str(self.ir.Module.parse(bytecode, self.context()))


@once
def load() -> TorchMlir:
    """Imports torch_mlir once per process."""
    return TorchMlir()
