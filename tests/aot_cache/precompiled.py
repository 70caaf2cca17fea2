"""What the processes of test_precompile.py run: `python -m tests.aot_cache.precompiled save|load|load-as-another FILE`.

Steps of training at several sizes by a function of two graphs, while Dynamo keeps its captures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters

import dynaxla
from dynaxla.cache import package
from tests.tolerances import assert_close


def work(x: Tensor, w: Tensor) -> Tensor:
    y = torch.nn.functional.gelu(x @ w)
    torch._dynamo.graph_break()
    return y.softmax(1) * x.shape[0]


def gradient(function: Any, x: Tensor, w: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    function(x, leaf).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def check() -> None:
    compiled = torch.compile(work, backend="dynaxla", dynamic=True)
    for rows in (5, 9, 20):
        x, w = torch.randn(rows, 8), torch.randn(8, 4)
        assert_close(gradient(compiled, x, w), gradient(work, x, w))


def main() -> None:
    config.caching_precompile = True
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "load-as-another":
        package.versions = lambda: {"torch": "another"}  # type: ignore[assignment]
    if what != "save":
        torch.compiler.load_cache_artifacts(path.read_bytes())
    check()
    if what == "save":
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        path.write_bytes(saved[0])
    metrics = dynaxla.read_metrics()
    told = {name: getattr(metrics, name) for name in ("captures_loaded", "compiles", "loads")}
    print(json.dumps({"frames": counters["frames"]["total"], **told}))


if __name__ == "__main__":
    main()
