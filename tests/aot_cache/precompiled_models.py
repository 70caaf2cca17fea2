"""What the processes of test_precompiled_models.py run: `python -m tests.aot_cache.precompiled_models save|load|change FILE`.

Models and functions whose code is a wrapper's, while Dynamo keeps its captures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, ResNetConfig, ResNetForImageClassification

import dynaxla
from tests import wrapping
from tests.tolerances import assert_close

SHIFT = 0.25
FUNCTIONS = ("closing", "defaulting", "keyed", "in_its_module", "elsewhere", "replaced")


def _moved(x: Tensor) -> Tensor:
    return x + SHIFT


def _moved_otherwise(x: Tensor) -> Tensor:
    return x - 7 * SHIFT


@wrapping.scaled(2.0)
def closing(x: Tensor) -> Tensor:
    return x.sin()


@wrapping.scaled(2.0)
def defaulting(x: Tensor, power: int = 2) -> Tensor:
    return x**power


@wrapping.scaled(2.0)
def keyed(x: Tensor) -> Tensor:
    return x.exp()


@wrapping.scaled(2.0)
def in_its_module(x: Tensor) -> Tensor:
    return x.cos()


@wrapping.scaled(2.0)
def elsewhere(x: Tensor) -> Tensor:
    return _moved(x) * SHIFT


@wrapping.scaled(2.0)
def replaced(x: Tensor) -> Tensor:
    return _moved(x.tan())


def change(name: str) -> None:
    """Changes one thing that guards of a function were on: a closure, a default, a global of the wrapper's or of its own."""
    function = globals()[name]
    inner = function.__wrapped__
    match name:
        case "closing":
            factors = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
            factors["factor"].cell_contents = 3.0
        case "defaulting":
            inner.__defaults__ = (3,)
        case "keyed":
            function.__kwdefaults__ = {"weight": 4.0}
        case "in_its_module":
            wrapping.OFFSET = 5.0
        case "elsewhere":
            globals()["SHIFT"] = 6.0
        case "replaced":
            globals()["_moved"] = _moved_otherwise


def models() -> Iterator[tuple[Any, Tensor]]:
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    yield BertModel(BertConfig(vocab_size=50, **small)), torch.randint(0, 50, (2, 6))
    yield GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)), torch.randint(0, 50, (2, 6))
    sizes: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    yield ResNetForImageClassification(ResNetConfig(**sizes)), torch.randn(1, 3, 16, 16)


def captures_of(function: Callable[..., Any], x: Tensor) -> int:
    """Compares a call with eager's, and says how many graphs were captured for it."""
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        found, expected = torch.compile(function, backend="dynaxla")(x), function(x)
    assert_close(*((y if isinstance(y, Tensor) else y[0]) for y in (found, expected)))
    return counters["stats"]["unique_graphs"] - before  # type: ignore[no-any-return]


def main() -> None:
    torch.manual_seed(0)
    config.caching_precompile = True
    what, path = sys.argv[1], Path(sys.argv[2])
    if what != "save":
        torch.compiler.load_cache_artifacts(path.read_bytes())
    captures: dict[str, int] = {}
    for name in FUNCTIONS:
        if what == "change":
            change(name)
        captures[name] = captures_of(globals()[name], torch.full((3,), 0.3))
    for model, x in models():
        if what == "change":
            model.config._attn_implementation = "eager"
        captures[type(model).__name__] = captures_of(model.eval(), x)
    if what == "save":
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        path.write_bytes(saved[0])
    print(json.dumps({**captures, "compiles": dynaxla.read_metrics().compiles}))


if __name__ == "__main__":
    # By its own name: what is defined in a module named __main__ is another process's.
    from tests.aot_cache import precompiled_models

    precompiled_models.main()
