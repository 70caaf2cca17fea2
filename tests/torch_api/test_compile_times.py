"""What Dynamo and Inductor measure of themselves."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import compile_fx
from torch.fx import GraphModule

from dynaxla.torch_api import compile_times
from tests.torch_api.boundary import boundary


def _broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


@boundary("compile_times.DynamoTimes", "compile_times.read_dynamo_times")
def test_times_of_captures_and_backends_are_apart() -> None:
    def slow(module: GraphModule, inputs: Sequence[Any]) -> Any:
        time.sleep(0.2)
        return module.forward

    before = compile_times.read_dynamo_times()
    torch.compile(_broken, backend=slow)(torch.ones(2))
    after = compile_times.read_dynamo_times()
    assert after.graphs - before.graphs == 2
    assert after.backend_s - before.backend_s >= 0.4
    assert after.capture_s - before.capture_s > 0
    assert after.inductor_s == before.inductor_s
    source = inspect.getsource(compile_fx)
    assert all(f'"compile_fx.<locals>.{name}"' in source for name in ("fw_compiler_base", "bw_compiler"))
