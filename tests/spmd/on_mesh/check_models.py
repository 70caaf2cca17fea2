"""Models that train over a mesh: outputs, gradients and five steps of AdamW are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaxla
from dynaxla.mesh import Mesh
from tests.spmd.on_mesh.check_graphs import compiled
from tests.spmd.on_mesh.check_tensors import spec_of

CLOSE, AFTER_STEPS = 1e-5, 1e-3
"""Of outputs and gradients, and of what five steps gave: relative to the largest number of a tensor."""


class ConvNet(nn.Module):
    """[batch, 3, 8, 8] -> [batch, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(F.relu(self.second(x)), 2).flatten(1)
        return self.head(F.dropout(x, 0.1, self.training))


class Experts(nn.Module):
    """Four experts of which each row takes its two best, every expert on every row: [batch, 16] -> [batch, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *size) / 4) for size in ((16, 32), (32, 16)))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).topk(2)
        share = torch.zeros(x.shape[0], 4, device=x.device).scatter(1, chosen, best)
        inner = F.silu(torch.einsum("bi,eij->ebj", x, self.up))
        return x + torch.einsum("ebj,eji,be->bi", inner, self.down, share)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **sizes))  # type: ignore[arg-type]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_labels": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=64, num_hidden_layers=2, **sizes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A model, its batch, and how it is split over the axis "model".

    Attributes:
        outputs: gives the outputs, of a batch of tensors.
        plan: by patterns of names, or of the model.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    outputs: Callable[[nn.Module, Tensor], Tensor]
    plan: Callable[[nn.Module], Mapping[str, Any]]


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 64, (8, 16)), torch.randint(0, 64, (8, 16))


CASES = {
    "llama": Case(llama, _tokens, lambda m, x: m(input_ids=x).logits.flatten(0, 1), lambda m: m.tp_plan),  # type: ignore[arg-type, return-value]
    "bert": Case(
        bert,
        lambda: (torch.randint(0, 64, (8, 16)), torch.randint(0, 4, (8,))),
        lambda m, x: m(input_ids=x).logits,
        lambda m: {
            "*attention.self.*": ("model",),
            "*attention.output.dense.weight": (None, "model"),
            "*intermediate.dense.*": ("model",),
            "*layer.*.output.dense.weight": (None, "model"),
        },
    ),
    "conv": Case(
        ConvNet,
        lambda: (torch.randn(16, 3, 8, 8), torch.randint(0, 16, (16,))),
        lambda m, x: m(x),
        lambda m: {"first.weight": ("model",), "norm.*t": ("model",), "second.weight": (None, "model")},
    ),
    "experts": Case(
        Experts,
        lambda: (torch.randn(16, 16), torch.randint(0, 16, (16,))),
        lambda m, x: m(x),
        lambda m: {"up": ("model",), "down": ("model",)},
    ),
}


def on_data(model: nn.Module, case: Case) -> Mesh:
    mesh = dynaxla.make_mesh((8,), ("data",))
    dynaxla.shard(model, mesh, {})
    return mesh


def on_model(model: nn.Module, case: Case) -> Mesh:
    mesh = dynaxla.make_mesh((4,), ("model",))
    dynaxla.shard(model, mesh, case.plan(model))
    return mesh


def fully(model: nn.Module, case: Case) -> Mesh:
    mesh = dynaxla.make_mesh((8,), ("data",))
    dynaxla.fully_shard(model, mesh, "data")
    return mesh


def mixed(model: nn.Module, case: Case) -> Mesh:
    mesh = dynaxla.make_mesh((2, 4), ("data", "model"))
    dynaxla.shard(model, mesh, case.plan(model), axis="model")
    dynaxla.fully_shard(model, mesh, "data")
    return mesh


WAYS = {"data": on_data, "tensor": on_model, "fully": fully, "mixed": mixed}


@dataclass(frozen=True)
class Trained:
    """What training gave, on the host."""

    losses: list[Tensor]
    outputs: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def train(model: nn.Module, case: Case, batch: tuple[Tensor, Tensor], fused: bool) -> Trained:
    torch.manual_seed(7)
    run = compiled(lambda x: case.outputs(model, x))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4, fused=fused)
    losses, kept = [], []
    for step in range(5):
        outputs = run(batch[0])
        loss = F.cross_entropy(outputs, batch[1].flatten())
        loss.backward()
        if step == 0:
            gradients = {name: value.grad for name, value in model.named_parameters()}
            for name, value in model.named_parameters():
                assert spec_of(value.grad) == spec_of(value), name
            kept = [outputs.detach().cpu(), {name: value.cpu().clone() for name, value in gradients.items()}]
        before = {name: spec_of(value) for name, value in model.state_dict().items()}
        optimizer.step()
        assert {name: spec_of(value) for name, value in model.state_dict().items()} == before
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return Trained(losses, *kept, {name: value.cpu() for name, value in model.state_dict().items()})


def assert_alike(got: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    if not expected.is_floating_point():
        assert torch.equal(got, expected), name
        return
    scale = max(expected.abs().max().item(), 1e-3)
    assert (got - expected).abs().max().item() <= tolerance * scale, name


@pytest.fixture(scope="module", params=CASES)
def on_one_device(request: pytest.FixtureRequest) -> tuple[Case, nn.Module, tuple[Tensor, Tensor], Trained]:
    torch.manual_seed(0)
    case = CASES[request.param]
    model, batch = case.make(), case.batch()
    one = copy.deepcopy(model).to("dynaxla")
    x, labels = (each.to("dynaxla") for each in batch)
    return case, model, batch, train(one, case, (x, labels), fused=True)


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_one_device(
    way: str, on_one_device: tuple[Case, nn.Module, tuple[Tensor, Tensor], Trained]
) -> None:
    case, model, batch, expected = on_one_device
    there = copy.deepcopy(model)
    mesh = WAYS[way](there, case)
    split = ("data",) if "data" in mesh.axes else ()
    got = train(there, case, tuple(dynaxla.shard(each, mesh, split) for each in batch), fused=way != "mixed")  # type: ignore[arg-type]
    assert_alike(got.outputs, expected.outputs, CLOSE, "outputs")
    for name, gradient in expected.gradients.items():
        assert_alike(got.gradients[name], gradient, CLOSE, name)
    assert_alike(torch.stack(got.losses), torch.stack(expected.losses), AFTER_STEPS, "losses")
    for name, value in expected.state.items():
        assert_alike(got.state[name], value, AFTER_STEPS, name)
