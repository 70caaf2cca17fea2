"""The child that compiles in the background. `python -m dynaxla.async_compile.worker FD` is the child.

It pads and lowers; torch-mlir and XLA are in children of its own, as in the caller's process, so that their faults end
these alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import zlib
from collections import OrderedDict
from dataclasses import fields, replace
from typing import Any

import torch

from dynaxla.async_compile.protocol import (
    Answer,
    CompileFailed,
    CompileReply,
    CompileRequest,
    NotSerializable,
    PaddingRefused,
    PlanReply,
    PlanRequest,
    UnknownPart,
    pack_answer,
    unpack_spec,
)
from dynaxla.bucketing.bucket_planner import extend_plan
from dynaxla.bucketing.padded_graph import CannotPad
from dynaxla.cache.store import open_store
from dynaxla.errors import DynaxlaError
from dynaxla.isolation.children import serve
from dynaxla.isolation.failures import KnownFailures, failures_file
from dynaxla.lowering import stablehlo_module
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.observe.compile_timing import CapturedFunction, CompileTiming
from dynaxla.observe.dump import Dump
from dynaxla.observe.recorder import Metrics, Recorder
from dynaxla.ops.table import core_table
from dynaxla.options import Limits
from dynaxla.pipeline import Pipeline
from dynaxla.programs.outline_pickling import CannotSerialize
from dynaxla.programs.part_compiler import PartCompiler
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.specialization import ExactSpec, empty_arguments
from dynaxla.runtime import xla
from dynaxla.runtime.client import Executable
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.runtime.pjrt_clients import CpuClient

MAX_PARTS = 32
"""Parts remembered; any other is sent anew."""

IDLE_S = 300.0
"""It ends when it was asked nothing for so long; a later job starts another."""

NICENESS = 10
"""Added to its niceness: of cores that calls keep busy the child has a tenth."""


class UnloadedExecutable:
    """An executable that is not loaded here: what `Executable` needs on its way to the caller.

    Args:
        data: what `CpuClient.load` takes.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return self._data


class CompileClient(CpuClient):
    """The CPU client of a process that compiles for another, and runs nothing."""

    def compile(self, module: bytes, limits: Limits, partitions: int = 1) -> Any:
        """Compiles a pure StableHLO module.

        Raises:
            CompileError: XLA's compiler refused it, died of it, took too long or too much memory.
            CannotShip: XLA compiles it but cannot serialize it.
        """
        serialized = self.worker.compile(module, limits, partitions)
        if serialized is None:
            raise CannotSerialize("XLA cannot serialize its program")
        return UnloadedExecutable(zlib.compress(serialized, level=1))

    def load(self, serialized: bytes, partitions: int = 1) -> Any:
        return UnloadedExecutable(serialized)


class RequestHandler:
    """Answers requests, one at a time."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._client = CompileClient()
        self._worker = LoweringWorker()
        self._worker.child.start()
        self._functions = FunctionTable()
        self._choice = LoweringChoice(KnownFailures(failures_file("torch-mlir")))
        self._tracing = threading.RLock()
        self._store = open_store()
        self._parts: OrderedDict[str, PartGraphs] = OrderedDict()
        self._log = _LogLines()
        logging.getLogger("dynaxla").addHandler(self._log)
        _ = core_table().records  # read before anybody waits
        stablehlo_module.load()

    def answer(self, request: CompileRequest | PlanRequest) -> bytes:
        """An `Answer`, packed."""
        if isinstance(request, PlanRequest):
            plan = extend_plan(request.counts, request.have, request.most, request.powers, request.price)
            return pack_answer(PlanReply(plan.to_json()))
        torch.set_default_dtype(request.default_dtype)
        self._log.lines.clear()
        try:
            return pack_answer(self._answer(request))
        except CannotPad as error:
            return pack_answer(PaddingRefused(error.reason, error.of_bucket))
        except CannotSerialize as error:
            return pack_answer(NotSerializable(str(error)))
        except DynaxlaError as error:
            return pack_answer(CompileFailed(str(error), tuple(self._log.lines)))
        except Exception as error:  # the border of what nobody waits for, see partition/error_boundary.py
            return pack_answer(CompileFailed(f"{type(error).__name__}: {error}", tuple(self._log.lines)))

    def _answer(self, request: CompileRequest) -> Answer:
        graphs = self._graphs(request)
        if graphs is None:
            return UnknownPart()
        if dict(request.jax) != dict(xla.settings()):
            raise CannotSerialize("JAX's settings were changed in the process")
        pipeline, before = self._pipeline(request), self._recorder.snapshot()
        spec = unpack_spec(request.spec)
        if isinstance(spec, ExactSpec):
            spec = ExactSpec(empty_arguments(spec.arguments))
        compiler = PartCompiler(graphs, pipeline)
        compiled = compiler.compile(spec, CompileTiming())
        fold = compiler.compile_fold(CompileTiming()) if request.fold else None
        return CompileReply(
            _serialize(compiled.executable),
            _serialize(fold),
            compiled.outline,
            _difference(before, self._recorder.snapshot()),
            tuple(self._log.lines),
        )

    def _graphs(self, request: CompileRequest) -> PartGraphs | None:
        graphs = self._parts.pop(request.digest, None)
        if graphs is None:
            graphs = None if request.part is None else request.part.unpack()
        if graphs is not None:
            self._parts[request.digest] = graphs
            if len(self._parts) > MAX_PARTS:
                self._parts.popitem(last=False)
        return graphs

    def _pipeline(self, request: CompileRequest) -> Pipeline:
        return Pipeline(
            client=self._client,
            worker=self._worker,
            functions=self._functions,
            executables=ExecutableCache(self._store if request.options.cache else None),
            choice=replace(self._choice, platform=self._client.platform),
            tracing=self._tracing,
            recorder=self._recorder,
            options=request.options,
            dump=Dump(None, ()),
            origin=CapturedFunction("a part"),
        )


class _LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _serialize(executable: Executable | None) -> bytes | None:
    return None if executable is None else executable.serialize()


def _difference(before: Metrics, after: Metrics) -> dict[str, float]:
    """The counters that grew, by how much."""
    numbers = [f.name for f in fields(Metrics) if isinstance(getattr(after, f.name), (int, float))]
    return {name: moved for name in numbers if (moved := getattr(after, name) - getattr(before, name))}


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(sys.argv[1:], RequestHandler().answer, IDLE_S)
