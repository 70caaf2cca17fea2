"""The zoo on a GPU: torch's CUDA tensors through JAX's plugin, forward and five steps of training, with eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.tolerances import RELATIVE
from tests.zoo.architecture import Architecture
from tests.zoo.compare import worst_leaf
from tests.zoo.registry import ARCHITECTURES
from tests.zoo.training import Trainee, train, trainee
from tests.zoo.training_check import LIMIT, compare

TRAINED = (
    "mlp",
    "resnet",
    "llama",
    "lstm",
    "graph-network",
    "recommender",
    "dit",
    "transformer-encoder",
    "bert",
    "vit",
)
ROUNDINGS = 2
"""GPUs add in another order than the table's processor, and cuBLAS in another than XLA: so many times the table's limit."""


def to_gpu(value: Any) -> Any:
    """A copy on the GPU, caches of keys and values included."""
    return pytree.tree_map(_leaf_to_gpu, value)


def _leaf_to_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if hasattr(value, "layers"):
        value = copy.deepcopy(value)
        for layer in value.layers:
            vars(layer).update(to_gpu({**vars(layer), "device": torch.device("cuda", 0)}))
    return value


EXPECTED = dict.fromkeys(
    ("mamba", "falcon-mamba"), "`device` of the second layer of the cache is None, where eager's is cuda:0"
)
"""What deviates on a GPU, and why: it must."""


def _cases() -> Iterator[Any]:
    for each in ARCHITECTURES:
        known = EXPECTED.get(each.name)
        marks = () if known is None else (pytest.mark.xfail(strict=True, reason=known),)
        yield pytest.param(each, id=each.name, marks=marks)


@pytest.mark.parametrize("architecture", _cases())
def test_as_eager_on_the_gpu(architecture: Architecture) -> None:
    net, args, kwargs = architecture.build(torch.float32)
    net, args, kwargs = net.cuda(), to_gpu(args), to_gpu(kwargs)

    def run(function: Any) -> Any:
        given, named = copy.deepcopy((args, kwargs))
        return function(*given, **named)

    with torch.no_grad():
        run(net)
        path, error = worst_leaf(run(torch.compile(net, backend="dynaxla")), run(net))
    assert error <= ROUNDINGS * RELATIVE[torch.float32], f"{path} is off by {error:.2e}"


@pytest.mark.parametrize(
    "architecture", [each for each in ARCHITECTURES if each.name in TRAINED], ids=lambda each: each.name
)
def test_training_on_the_gpu(architecture: Architecture) -> None:
    def on_gpu() -> Trainee:
        made = trainee(architecture)
        return Trainee(made.net.cuda(), to_gpu(made.args), to_gpu(made.kwargs), to_gpu(made.targets))

    eager = train(on_gpu())
    mine = train(on_gpu(), lambda f: torch.compile(f, backend="dynaxla"))
    assert compare(mine, eager).worst <= LIMIT
