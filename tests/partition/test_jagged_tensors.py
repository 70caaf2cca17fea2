"""Jagged nested tensors: a graph of their values and offsets, whose sizes have buckets, is compiled like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynaxla.device.registration import use
from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import poison
from tests.tolerances import assert_close

LENGTHS = ((2, 4), (3, 1, 5), (2, 2, 5), (7,), (12, 30, 2, 2), (0, 3, 2), (1, 1, 1))
WIDTH = 8
Function = Callable[[torch.Tensor], Any]
jagged = {"layout": torch.jagged}


class Block(nn.Module):
    """Attention within each row, then a layer of all elements: [rows, (length), 8] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm(x).unflatten(-1, [2, WIDTH // 2]).transpose(1, 2)
        return x + self.linear(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2))


def make_jagged(*lengths: int, needs: bool = False) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in lengths], requires_grad=needs, **jagged)


def parts(value: Any) -> list[torch.Tensor]:
    """The dense tensors of a result: of a jagged one its values and offsets."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in parts(each)]
    return [value.values(), value.offsets()] if value.is_nested else [value]


TRAINED: dict[str, Function] = {
    "elementwise": lambda x: x.sin() * 2 + x.cos(),
    "values": lambda x: (x.sin() * 2).values(),
    "a norm": lambda x: F.layer_norm(x, (WIDTH,)).relu(),
    "a softmax over rows": lambda x: torch.softmax(x, 1),
    "the largest of rows": lambda x: x.amax(1),
    "padded": lambda x: x.exp().to_padded_tensor(0.0),
    "padded to a size": lambda x: x.exp().to_padded_tensor(-1.0, (x.size(0), 40, WIDTH)),
    "a choice": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "parts of the last dim": lambda x: torch.cat([x.chunk(2, -1)[1] * 3, x], -1),
    "a factor per row": lambda x: x * torch.arange(x.size(0)).view(-1, 1, 1),
    "rows": lambda x: [row * 2 for row in x.unbind()],
    "made of its parts": lambda x: torch.nested.nested_tensor_from_jagged(x.values() * 3, x.offsets()),
    "results of several kinds": lambda x: (x * 2, x.offsets().diff(), x.values().sum()),
}
INFERENCE: dict[str, Function] = {
    "sums of rows": lambda x: x.sum(1),
    "lengths": lambda x: x.offsets().diff().unsqueeze(-1) * x.sum(1),
    "bool": lambda x: (x > 0).to_padded_tensor(0),
    "bfloat16": lambda x: x.bfloat16().exp(),
    "transposed": lambda x: x.transpose(1, 2) * 2,
}


@pytest.mark.parametrize("name", [*TRAINED, *INFERENCE])
@torch.no_grad()
def test_jagged_tensors_are_compiled(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    function = {**TRAINED, **INFERENCE}[name]
    compiled = torch.compile(function, backend="dynaxla")
    with recorder.expect(eager_ops=0):
        for lengths in LENGTHS:
            x = make_jagged(*lengths)
            for actual, expected in zip(parts(compiled(x)), parts(function(x)), strict=True):
                assert_close(actual, expected)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_jagged_tensors(name: str, recorder: Recorder) -> None:
    function = TRAINED[name]
    compiled = torch.compile(function, backend="dynaxla")
    with recorder.expect(eager_ops=0):
        for lengths in LENGTHS[:5]:
            x, gradients = make_jagged(*lengths, needs=True), []
            for call in (compiled, function):
                loss = sum(part.square().sum() for part in parts(call(x)) if part.requires_grad)
                gradients.append(torch.autograd.grad(loss, x)[0].values())
            assert_close(*gradients)


@torch.no_grad()
def test_programs_are_as_many_as_buckets(recorder: Recorder) -> None:
    """Neither the least length of a row nor who has it makes a program; the sum of lengths and the largest have buckets."""
    table, block = nn.Embedding(50, WIDTH), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def pool(x: torch.Tensor) -> torch.Tensor:
        hidden = block(table(x))
        return (torch.softmax(hidden, 1) * hidden).sum(1)

    def indices(*lengths: int) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.randint(0, 50, (n,)) for n in lengths], **jagged)

    compiled = torch.compile(pool, backend="dynaxla")
    for lengths in ((20, 30, 13), (25, 25, 10), (30, 2, 26)):
        compiled(indices(*lengths))
    with recorder.expect(compiles=0, eager_ops=0):
        for lengths in ((22, 31, 7), (9, 18, 32), (24, 24, 9)):
            x = indices(*lengths)
            assert_close(compiled(x), pool(x))


@torch.no_grad()
def test_attention_within_rows() -> None:
    block = Block()
    compiled = torch.compile(block, backend="dynaxla")
    for lengths in ((2, 4), (3, 1, 5), (6, 2, 3)):
        x = make_jagged(*lengths)
        for actual, expected in zip(parts(compiled(x)), parts(block(x)), strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("function", [torch.ldexp, torch.pow])
def test_gradients_where_eager_has_strides_that_torch_does_not_predict(
    function: Any, is_given: bool, recorder: Recorder
) -> None:
    """The ragged dim is the last one of the values: their strides vary, and such a stride was taken for a gradient."""

    def raise_rows(x: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
        return function(x, rows)  # type: ignore[no-any-return]

    compiled = torch.compile(function if is_given else raise_rows, backend="dynaxla")
    for last in (9, 12, 15):
        values, offsets = torch.randn(last, 4).t(), torch.tensor([0, 2, 6, last])
        given = (torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2),)
        x, gradients = torch.tensor(1.5, requires_grad=True), []
        with recorder.expect(eager_ops=0):
            result = compiled(x, *(given if is_given else (values, offsets)))
        for each in (result, raise_rows(x, values, offsets)):
            gradients.append(torch.autograd.grad(each.values().square().sum(), x)[0])
        assert_close(*gradients)


def test_training_a_layer() -> None:
    net = nn.Linear(WIDTH, 2)
    compiled = torch.compile(net, backend="dynaxla")
    for lengths in ((2, 4), (3, 1), (2, 2, 5)):
        x = make_jagged(*lengths)
        gradients = []
        for function in (compiled, net):
            net.zero_grad()
            function(x).values().square().sum().backward()
            gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        for actual, expected in zip(*gradients, strict=True):
            assert_close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["elementwise", "a softmax over rows", "the largest of rows", "a choice"])
def test_on_the_device(name: str, recorder: Recorder) -> None:
    device = use()
    function = TRAINED[name]
    compiled = torch.compile(function, backend="dynaxla")
    with recorder.expect(eager_ops=0):
        for lengths in LENGTHS[:3]:
            x = make_jagged(*lengths)
            moved = torch.nested.nested_tensor([row.clone().to(device) for row in x.unbind()], **jagged)
            for call in (function, compiled):
                for actual, expected in zip(parts(call(moved)), parts(function(x)), strict=True):
                    assert_close(actual.cpu(), expected)


OFFSETS = torch.tensor([0, 2, 2, 5])


def _pad(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._jagged_to_padded_dense_forward(values, [offsets], [3], 2.5)  # type: ignore[no-any-return]


def _unpad(dense: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._padded_dense_to_jagged_forward(dense, [offsets], 5)  # type: ignore[no-any-return]


VALUES = torch.arange(10).reshape(5, 2)
OPS: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]] = {
    "floats": (_pad, VALUES + 0.5, OFFSETS),
    "integers": (_pad, VALUES, OFFSETS),
    "bools": (_pad, VALUES > 4, OFFSETS),
    "offsets of 32 bits": (_pad, VALUES + 0.5, OFFSETS.int()),
    "rows that are cut": (_pad, VALUES + 0.5, torch.tensor([0, 5])),
    "no elements": (_pad, torch.randn(0, 2), OFFSETS * 0),
    "no rows": (_pad, torch.randn(0, 2), torch.tensor([0])),
    "one dim": (_pad, VALUES[:, 0] + 0.5, OFFSETS),
    "three dims": (_pad, torch.randn(5, 2, 2), OFFSETS),
    "values by columns": (_pad, torch.randn(2, 5).t(), OFFSETS),
    "unpadded": (_unpad, torch.randn(3, 4, 2), OFFSETS),
    "unpadded integers": (_unpad, torch.arange(24).reshape(3, 4, 2), OFFSETS.int()),
    "unpadded, by rows": (_unpad, torch.randn(4, 3, 2).transpose(0, 1), OFFSETS),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_each_op(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    op, *args = OPS[name]
    actual, expected = torch.compile(op, backend="dynaxla", dynamic=dynamic)(*args), op(*args)
    assert_close(actual, expected)
    assert actual.stride() == expected.stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_eager_refuses_raises(dynamic: bool) -> None:
    compiled = torch.compile(_unpad, backend="dynaxla", dynamic=dynamic)
    with pytest.raises(RuntimeError, match="a row is longer than dim 1 of the padded tensor"):
        compiled(torch.randn(3, 2, 2), OFFSETS)
    with pytest.raises(RuntimeError, match="the last offset is not the number of all rows' elements"):
        compiled(torch.randn(3, 4, 2), torch.tensor([0, 2, 2, 4]))
