"""Whole models at lengths and batches that vary, with junk in the padding: eager's numbers, from one executable a bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import dynaxla
import dynaxla.errors
from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.part_graphs import PartGraphs
from tests.bucketing.eager_programs import eager_programs, xla_first
from tests.bucketing.poison import poison
from tests.lists import quick
from tests.tolerances import RELATIVE, assert_close
from tests.zoo.compare import worst_leaf
from tests.zoo.registry import find

SHAPES = ((2, 13), (2, 12), (3, 10), (2, 7), (3, 18), (3, 15), (2, 20))
"""(batch, length). After the first two the graph is symbolic in the length, after the third in both."""


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def _resized(value: Any, batch: int, length: int, old: tuple[int, int]) -> Any:
    """A batch of token-like inputs at another batch and length."""
    if not isinstance(value, torch.Tensor) or value.shape[:2] != old:
        return value
    wider = torch.cat([torch.cat([value, value.flip(0)])] * 2, 1)
    return wider[:batch, :length].contiguous()


@pytest.mark.parametrize(
    "name",
    [
        *quick(["bert", "gpt2", "llama"], "llama"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "gemma2", "electra")),
    ],
)
@torch.no_grad()
def test_text_models(name: str, recorder: Recorder, full: bool) -> None:
    net, args, kwargs = find(name).build(torch.float32)
    old = tuple(next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)).shape[:2])
    compiled = torch.compile(net, backend="dynaxla")
    before = recorder.snapshot()
    with xla_first(3, full):  # one of each graph
        for batch, length in SHAPES:
            given, named = tree_map(lambda v, b=batch, n=length: _resized(v, b, n, old), (args, kwargs))
            path, error = worst_leaf(compiled(*given, **named), net(*given, **named))
            assert error <= RELATIVE[torch.float32], f"{path} at {(batch, length)} is off by {error:.1e}"
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert after.eager_ops == before.eager_ops
    assert after.compiles - before.compiles <= 6, "1 static graph, 1 bucket of the second, 4 of the third"


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.wide = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.mix(self.first(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, 16)
        x = x + self.out(y)
        return x + self.wide(self.second(x))


class Image(nn.Module):
    """A convolution, a batch norm that counts, and a mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.convolution(x))).mean((2, 3)))


TRAINED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), lambda n: torch.randn(n, 8)),
    "block": (Block, lambda n: torch.randn(3, n, 16)),
    "image by batch": (Image, lambda n: torch.randn(n, 3, 8, 8)),
    "image by size": (Image, lambda n: torch.randn(4, 3, n, n + 1)),
}


@pytest.mark.parametrize("name", quick(TRAINED, "mlp", "image by size"))  # test_training.py has the likes of the others
def test_training(name: str, full: bool) -> None:
    make, draw = TRAINED[name]
    net = make().double()
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    with xla_first(2, full):
        for size in (5, 9, 12, 16, 17, 31):
            x = draw(size).double()
            mine, eager = (_gradients(run, owner, x) for run, owner in ((compiled, net), (twin, twin)))
            for a, b in zip(mine, eager, strict=True):
                assert_close(a, b)


def _gradients(run: Any, owner: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of the input and the weights, where they are not zero but for rounding; and the buffers, as they are afterwards."""
    given = x.clone().requires_grad_()
    owner.zero_grad()
    (run(given) ** 3).mean().backward()
    found = [given.grad, *(p.grad for p in owner.parameters())]
    return [g for g in found if g is not None and g.abs().max() > 1e-12] + list(owner.buffers())


def test_require_names_the_op_that_cannot_be_padded() -> None:
    compiled = torch.compile(
        lambda x: torch.linalg.lu(x)[2].abs(), backend="dynaxla", options={"bucketing": "require"}, dynamic=True
    )
    with pytest.raises(dynaxla.errors.UnsupportedError, match=r"aten\.linalg_lu.*per exact shape"):
        compiled(torch.randn(9, 9))


@torch.no_grad()
def test_a_marked_dim_compiles_its_bucket_at_once(recorder: Recorder) -> None:
    compiled = torch.compile(lambda x: (x.softmax(0), x.mean()), backend="dynaxla")
    x = torch.randn(40, 3)
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Explicit((10, 50, 100)), min=2, max=120)
    with recorder.expect(graphs=1, compiles=1):
        compiled(x), compiled(torch.randn(33, 3)), compiled(torch.randn(50, 3))
    with recorder.expect(graphs=0, compiles=3):
        for size in (7, 51, 100, 3, 110):
            y = torch.randn(size, 3)
            for mine, eager in zip(compiled(y), (y.softmax(0), y.mean()), strict=True):
                assert_close(mine, eager)


@pytest.mark.parametrize(
    ("dim", "low", "high", "told"), [(2, None, None, "no dim 2"), (0, 50, None, "size 40"), (0, None, 39, "size 40")]
)
def test_a_mark_that_cannot_be(dim: int, low: int | None, high: int | None, told: str) -> None:
    with pytest.raises(dynaxla.errors.OptionError, match=told):
        dynaxla.mark_bucketed(torch.randn(40, 3), dim, min=low, max=high)


@pytest.mark.parametrize("name", quick(["bert", "gpt2", "llama"], "bert"))
@torch.no_grad()
def test_a_text_model_is_masked_in_its_attentions_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values and the scores' mask: three a layer, beside what checks of values mask."""
    made = []
    mask = PaddedGraphBuilder.mask

    def counting(self: PaddedGraphBuilder, value: Any, dims: Any, fill: Any) -> Any:
        masked = mask(self, value, dims, fill)
        made.extend([masked] if masked is not value else [])
        return masked

    monkeypatch.setattr(PaddedGraphBuilder, "mask", counting)
    net, args, kwargs = find(name).build(torch.float32)
    old = tuple(next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)).shape[:2])
    given, named = tree_map(lambda v: _resized(v, 3, 18, old), (args, kwargs))
    with eager_programs():
        torch.compile(net, backend="dynaxla", dynamic=True, options={"value_checks": False})(*given, **named)
    assert len(made) == 3 * net.config.num_hidden_layers


@torch.no_grad()
def test_sizes_that_cannot_be_read_are_told(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setattr(PartGraphs, "find_bucket_scheme", lambda self, policies: None)
    function, x = (lambda x: x.softmax(0)), torch.randn(9, 3)
    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    assert_close(compiled(x), function(x))
    assert (
        "a size that varies does not follow from any one of its inputs' sizes" in recorder.snapshot().exact_shapes[-1]
    )
    torch._dynamo.reset()
    required = torch.compile(function, backend="dynaxla", options={"bucketing": "require"}, dynamic=True)
    with pytest.raises(dynaxla.errors.UnsupportedError):
        required(x)
