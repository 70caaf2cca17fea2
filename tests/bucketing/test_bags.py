"""Training of embedding bags whose items and bags vary in number: a program for each bucket."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

ITEMS = (20, 23, 27, 31, 40, 45, 50, 60)


class Clicks(nn.Module):
    """A tower of a recommender: bags of items, and a head."""

    def __init__(self, mode: str, **settings: bool | int) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 8, mode=mode, **settings)
        self.head = nn.Linear(8, 3)

    def forward(self, items: Tensor, starts: Tensor | None, weights: Tensor | None = None) -> Tensor:
        return self.head(self.bags(items, starts, weights)).tanh()


def train(net: nn.Module, twin: nn.Module, *args: Tensor | None) -> None:
    compiled_loss, loss = net(*args).square().mean(), twin(*args).square().mean()
    compiled_loss.backward()
    loss.backward()
    assert_close(compiled_loss, loss)
    for mine, eager in zip(net.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert eager.grad is not None
        assert_close(mine.grad, eager.grad)


def starts_of(items: int, bags: int, *, last: bool) -> Tensor:
    starts = torch.cat([torch.zeros(1, dtype=torch.long), torch.randint(0, items, (bags - 1,))]).sort()[0]
    return torch.cat([starts, torch.tensor([items])]) if last else starts


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("sum", {}),
        ("mean", {"padding_idx": 3}),
        pytest.param("max", {}, marks=pytest.mark.long),
        pytest.param("mean", {"include_last_offset": True}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("bags_vary", [False, True])
def test_a_tower(mode: str, settings: dict[str, bool | int], bags_vary: bool, recorder: Recorder) -> None:
    twin = Clicks(mode, **settings)
    net = copy.deepcopy(twin)
    net.compile(backend="dynaxla")
    before = recorder.snapshot()
    with recorder.expect(eager_ops=0):
        for items in ITEMS:
            starts = starts_of(items, items // 5 if bags_vary else 4, last=bool(settings.get("include_last_offset")))
            train(net, twin, torch.randint(50, (items,)), starts)
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert after.compiles - before.compiles <= 10  # of forward and backward


def test_gradients_by_frequency(recorder: Recorder) -> None:
    """Each row's gradient is divided by how often the row is read, as `nn.Embedding` does. torch's kernel of bags for the CPU
    divides by the count of another row."""
    bags = nn.EmbeddingBag(50, 8, mode="sum", scale_grad_by_freq=True)
    rows = nn.Embedding(50, 8, scale_grad_by_freq=True)
    rows.load_state_dict(bags.state_dict())
    compiled, before = torch.compile(bags, backend="dynaxla"), recorder.snapshot()
    for items in ITEMS:
        given, starts = torch.randint(50, (items,)), starts_of(items, 4, last=False)
        bag = torch.searchsorted(starts, torch.arange(items), right=True) - 1
        summed = torch.zeros(4, 8).index_add(0, bag, rows(given))
        for result, table in ((compiled(given, starts), bags.weight), (summed, rows.weight)):
            table.grad = None
            result.sin().sum().backward()
        assert bags.weight.grad is not None
        assert rows.weight.grad is not None
        assert_close(bags.weight.grad, rows.weight.grad)
    assert recorder.snapshot().exact_shapes == before.exact_shapes


def test_weighted_items(recorder: Recorder) -> None:
    twin = Clicks("sum")
    net = copy.deepcopy(twin)
    net.compile(backend="dynaxla")
    before = recorder.snapshot()
    for items in ITEMS:
        given = torch.randint(50, (items,)), starts_of(items, items // 5, last=False)
        weights = torch.rand(items)
        mine, eager = (weights.clone().requires_grad_() for _ in range(2))
        net(*given, mine).square().mean().backward()
        twin(*given, eager).square().mean().backward()
        assert mine.grad is not None
        assert eager.grad is not None
        assert_close(mine.grad, eager.grad)
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert after.compiles - before.compiles <= 10


def test_bags_of_equal_sizes(recorder: Recorder) -> None:
    twin = Clicks("mean")
    net = copy.deepcopy(twin)
    net.compile(backend="dynaxla")
    before = recorder.snapshot()
    for rows in ITEMS:
        train(net, twin, torch.randint(50, (rows, 4)), None)
    after = recorder.snapshot()
    assert after.exact_shapes == before.exact_shapes
    assert after.compiles - before.compiles <= 10
