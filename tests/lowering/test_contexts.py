"""Modules share contexts of MLIR; what one leaves behind harms no other, and contexts do not grow for ever."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.lowering import stablehlo_module, torch_mlir_importer, torch_mlir_passes
from dynaxla.lowering.mlir_contexts import MOST_MODULES, SharedContext
from dynaxla.lowering.torch_dialect import import_calls
from dynaxla.lowering.torch_mlir_passes import LoweredModule, LoweringRejected
from tests.observe.test_dump import UNKNOWN


def test_a_context_is_for_so_many_modules() -> None:
    made: list[object] = []
    shared = SharedContext(lambda: made.append(object()) or made[-1])
    given = [shared.next_context() for _ in range(2 * MOST_MODULES + 1)]
    assert len(made) == 3
    assert given == [made[0]] * MOST_MODULES + [made[1]] * MOST_MODULES + [made[2]]


def _module(size: int) -> bytes:
    graph = make_fx(lambda x: torch.ops.aten.tanh.default(x), tracing_mode="fake")(torch.ones(size)).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    return import_calls(torch_mlir_importer.load(), [node], {})[0]


def test_modules_of_one_context_are_those_of_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind one that is refused, and one that is no module at all."""
    version = stablehlo_module.artifact_version()

    def lowered(size: int) -> bytes:
        found = torch_mlir_passes.lower(_module(size), version)
        assert isinstance(found, LoweredModule)
        return found.artifact

    shared = [lowered(size) for size in (3, 4, 3)]
    assert isinstance(torch_mlir_passes.lower(UNKNOWN.encode(), version), LoweringRejected)
    assert isinstance(torch_mlir_passes.lower(b"no module", version), LoweringRejected)
    shared.append(lowered(3))
    monkeypatch.setattr("dynaxla.lowering.mlir_contexts.MOST_MODULES", 1)
    monkeypatch.setattr(torch_mlir_importer, "load", cache(torch_mlir_importer.TorchMlir))
    torch_mlir_passes._load.cache_clear()
    fresh = [lowered(size) for size in (3, 4)]
    assert shared == [fresh[0], fresh[1], fresh[0], fresh[0]]
