"""Where the time of a first pass goes: what Dynamo, Inductor and this package count of their own work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Self

from dynaxla.runtime_state import read_metrics
from dynaxla.torch_api.compile_times import read_dynamo_times

STAGES: Mapping[str, str] = {
    "capture": "Dynamo",
    "autograd": "AOTAutograd, passes and partition",
    "lowering": "torch-mlir and JAX, to StableHLO",
    "compile": "XLA's or Inductor's compilers",
    "rest": "padding, loading, guards, and the runs themselves",
}


@dataclass(frozen=True, slots=True)
class CompileCounters:
    """Sums since the process began; the attributes in seconds are stages.

    Attributes:
        compiled, loaded: programs of dynaxla.
        graphs: graphs that Dynamo captured.
    """

    capture_s: float = 0.0
    autograd_s: float = 0.0
    lowering_s: float = 0.0
    compile_s: float = 0.0
    compiled: int = 0
    loaded: int = 0
    graphs: int = 0

    @classmethod
    def read(cls) -> Self:
        metrics, dynamo = read_metrics(), read_dynamo_times()
        return cls(
            dynamo.capture_s,
            dynamo.backend_s,
            metrics.lowering_s,
            metrics.compile_s + dynamo.inductor_s,
            metrics.compiles + metrics.folds,
            metrics.loads + metrics.fold_loads,
            dynamo.graphs,
        )

    def __add__(self, other: CompileCounters) -> CompileCounters:
        return CompileCounters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: CompileCounters) -> CompileCounters:
        return CompileCounters(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def programs(self) -> int:
        return self.compiled + self.loaded

    def split(self, seconds: float) -> dict[str, float]:
        """The seconds of a pass, in which these were counted, by stage."""
        known = dict(zip(STAGES, astuple(self)[:4], strict=False))
        return {**known, "rest": max(0.0, seconds - sum(known.values()))}
