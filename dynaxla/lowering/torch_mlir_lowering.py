"""Lowers calls by torch-mlir. Calls on which it fails are recorded as failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from dynaxla.errors import (
    LoweringCrashed,
    LoweringError,
    LoweringFailed,
    LoweringOutOfMemory,
    LoweringTimeout,
    LoweringUnavailable,
)
from dynaxla.isolation.failures import CompilerFailure, KnownFailures
from dynaxla.lowering import stablehlo_module, torch_mlir_importer
from dynaxla.lowering.call_graph import OpCall
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.lowering.stablehlo_functions import FunctionFinisher, StablehloFunction
from dynaxla.lowering.torch_dialect import import_calls
from dynaxla.observe.repro import write_repro
from dynaxla.ops.aten_calls import Form
from dynaxla.options import Limits

# A rejection is cheap to see again and says more than a remembered one; only these are kept on disk.
_KEPT_ON_DISK = (LoweringCrashed, LoweringOutOfMemory, LoweringTimeout)

# Calls to try one by one: starting a child after a death takes as long.
_FEW = 8

Calls = Sequence[tuple[OpCall, Node]]


@dataclass(frozen=True, slots=True)
class TorchMlirLowering:
    """Lowers calls by torch-mlir in one request. A request that fails is halved, down to the calls at fault.

    Attributes:
        worker: runs torch-mlir's passes.
        forms: the aten forms of ops that are imported as other ATen calls.
        failures: the record to which failures are added.
        report: called with every failure.
        limits: time and memory limits of one request.
        tracing: held while graphs are made and modules read, not while the worker works.
    """

    worker: LoweringWorker
    forms: Mapping[Any, Form]
    failures: KnownFailures
    report: Callable[[Node, CompilerFailure], None]
    limits: Limits
    tracing: threading.RLock

    def lower(self, calls: Calls, finisher: FunctionFinisher) -> Iterator[tuple[OpCall, StablehloFunction]]:
        """Lowers calls. Returns the functions of those on which torch-mlir succeeds.

        Raises:
            LoweringUnavailable: the child process cannot be started, or was ended from outside twice.
        """
        if not calls:
            return
        try:
            yield from self._together(calls, finisher)
        except LoweringUnavailable:
            raise  # no op is at fault
        except LoweringError as error:
            if len(calls) == 1:
                self._blame(*calls[0], error)
            else:
                for part in _parts(calls, error):
                    yield from self.lower(part, finisher)

    def text(self, nodes: Sequence[Node]) -> str:
        """The module of the torch dialect that nodes are imported as, readable."""
        with self.tracing:
            return torch_mlir_importer.load().text(import_calls(torch_mlir_importer.load(), nodes, self.forms)[0])

    def _together(self, calls: Calls, finisher: FunctionFinisher) -> list[tuple[OpCall, StablehloFunction]]:
        found = []
        with self.tracing:
            module, names = import_calls(torch_mlir_importer.load(), [node for _, node in calls], self.forms)
            version = stablehlo_module.artifact_version()
        artifact = self.worker.lower(module, version, self.limits)
        with self.tracing:
            lowered = finisher.mlir.load_artifact(finisher.mlir.context(), artifact)
            for name, (call, node) in zip(names, calls, strict=True):
                function = finisher.finish(lowered, name, call)
                if function is None:
                    self._blame(
                        call, node, LoweringFailed("stablehlo", "the function has not the type of torch's tensors")
                    )
                else:
                    found.append((call, function))
        return found

    def _blame(self, call: OpCall, node: Node, error: LoweringError) -> None:
        failure = CompilerFailure(str(call.target), error.id, error.explanation, self._repro(node, error))
        self.failures.add(call.key, failure, on_disk=isinstance(error, _KEPT_ON_DISK))
        self.report(node, failure)

    def _repro(self, node: Node, error: LoweringError) -> str | None:
        try:
            return str(write_repro("torch-mlir", self.text([node]), str(error), stablehlo_module.artifact_version()))
        except (OSError, LoweringError):
            return None  # no place to write to, or nothing to write: the failure is told all the same


def _parts(calls: Calls, error: LoweringError) -> Iterator[Calls]:
    """Splits a failed request; after a timeout into single calls, as each half might take as long again."""
    size = 1 if len(calls) <= _FEW or isinstance(error, LoweringTimeout) else (len(calls) + 1) // 2
    for start in range(0, len(calls), size):
        yield calls[start : start + size]
