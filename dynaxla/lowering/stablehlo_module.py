"""StableHLO modules in jaxlib's build of MLIR."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from dynaxla.isolation.once import once
from dynaxla.lowering.locations import SCOPE
from dynaxla.runtime.xla import MlirBindings, mlir


class StablehloModules:
    """Parses, prints and inspects StableHLO modules."""

    def __init__(self, bindings: MlirBindings) -> None:
        self.ir: Any = bindings.ir
        self.stablehlo: Any = bindings.stablehlo
        self.context = bindings.context
        self._full_context = bindings.full_context

    def load_artifact(self, context: Any, artifact: bytes) -> Any:
        return self.stablehlo.deserialize_portable_artifact(context, artifact)

    def parse(self, text: str) -> Any:
        """Parses a module. All modules share one context, which takes 5 ms to make."""
        return self.ir.Module.parse(text, self._texts)

    @cached_property
    def _texts(self) -> Any:
        return self._full_context()

    def bytecode(self, module: Any) -> bytes:
        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
        return stream.getvalue()

    def text(self, bytecode: bytes) -> str:
        """A module of bytecode, readable."""
        return str(self.ir.Module.parse(bytecode, self._full_context()))

    def symbol_name(self, operation: Any) -> str:
        return str(self.ir.StringAttr(operation.attributes["sym_name"]).value)

    def callee(self, operation: Any) -> str:
        """The function that a `func.call` calls."""
        return str(self.ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)

    def custom_target(self, operation: Any) -> str | None:
        """What a `stablehlo.custom_call` calls; None for another operation."""
        if operation.name != "stablehlo.custom_call":
            return None
        return str(self.ir.StringAttr(operation.attributes["call_target_name"]).value)


def walk(operation: Any) -> Iterator[Any]:
    """Yields every operation inside of an operation, outermost first."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from walk(inner.operation)


_SCOPE = re.compile(rf'loc\("(?:[^"]*/)?({SCOPE}(?:_\d+)+)[/"]')


def strip_locations(module: Any, *, keeps_scopes: bool) -> None:
    """Makes the locations of all operations unknown, in place. Text that has none gets those of its lines when it is read.

    Args:
        keeps_scopes: whether those within scopes of sub-graphs' nodes get the name of the innermost one.
    """
    scopes = [_SCOPE.match(str(operation.location)) for operation in walk(module.operation)] if keeps_scopes else []
    with module.context:
        mlir().pass_manager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        for operation, scope in zip(walk(module.operation), scopes, strict=keeps_scopes):
            if scope is not None:
                operation.location = mlir().ir.Location.name(scope[1])


@once
def load() -> StablehloModules:
    """Imports the bindings once per process."""
    return StablehloModules(mlir())


def artifact_version() -> str:
    """The newest version of StableHLO that jaxlib reads."""
    return str(load().stablehlo.get_current_version())
