"""Programs that eager PyTorch runs: for tests of which programs there are, and what padding does to them, without XLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Interpreter

from dynaxla import dispatch
from dynaxla.metrics.spent import Spent
from dynaxla.pipeline import Pipeline
from dynaxla.programs import PaddedShape
from dynaxla.runtime.client import Buffer, Client
from tests.bucketing.poison import poisoned

aten = torch.ops.aten


@dataclass(frozen=True)
class EagerProgram:
    """A program's graph, run op by op at its padded sizes."""

    graph: Graph
    client: Client

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        tensors = [self.client.to_tensor(argument) for argument in arguments]
        with torch.no_grad():
            results = _RowMajor(GraphModule({}, self.graph)).run(*tensors)
        return [self.client.to_buffer(result.contiguous()) for result in results]


class _RowMajor(Interpreter):
    """A view is a reshape of row-major values, whatever strides eager's tensors have."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


def run_programs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are counted as ever, and neither lowered nor compiled; padding holds junk."""

    def compile_nothing(pipeline: Pipeline, graph: Graph, spent: Spent, *, fold: bool = False) -> Any:
        pipeline.recorder.add(**{"folds" if fold else "compiles": 1})
        return EagerProgram(graph, pipeline.client)

    monkeypatch.setattr(Pipeline, "compile", compile_nothing)
    monkeypatch.setattr(dispatch, "_pad", _poisoned)


def _poisoned(tensor: torch.Tensor, padded: PaddedShape) -> torch.Tensor:
    """Junk, but for integers: eager raises for places that are none."""
    if tensor.is_floating_point():
        return poisoned(tensor, padded)
    made = torch.zeros(padded.sizes, dtype=tensor.dtype)
    made[tuple(slice(size) for size in tensor.shape)] = tensor
    return made
