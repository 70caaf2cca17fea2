"""Recurrent layers are one graph with a loop over time; results, gradients and strides are eager's, in buckets too.

The recorder counts a forward and its backward apart: `graphs=2` is one graph of Dynamo's.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from dynaxla.custom_ops.recurrence import RECURRENCE
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.recurrent import recurrence, recurrence_backward
from tests.lists import quick
from tests.tolerances import assert_close

LAYERS: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}, torch.float32),
    "lstm-projected": (nn.LSTM, {"num_layers": 2, "proj_size": 3, "bidirectional": True}, torch.float32),
    "lstm-without-bias": (nn.LSTM, {"bias": False}, torch.float64),
    "lstm-projected-without-bias": (nn.LSTM, {"bias": False, "proj_size": 3}, torch.float64),
    "lstm-bfloat16": (nn.LSTM, {}, torch.bfloat16),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}, torch.float32),
    "gru-without-bias": (nn.GRU, {"bias": False}, torch.float64),
    "gru-bfloat16": (nn.GRU, {}, torch.bfloat16),
    "tanh": (nn.RNN, {"num_layers": 2}, torch.float32),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}, torch.float64),
}


def train(layer: Any, module: nn.Module, *given: Tensor) -> list[Tensor]:
    """What the layer gives, and the gradients of its inputs and its module's parameters."""
    leaves = [x.clone().requires_grad_() for x in given]
    state = tuple(leaves[1:]) if len(leaves) == 3 else leaves[1] if len(leaves) == 2 else None
    results = tree_leaves(layer(leaves[0], state))
    loss = torch.stack([result.float().sin().sum() for result in results]).sum()
    return [*results, *torch.autograd.grad(loss, [*leaves, *module.parameters()])]


def check(layer: Any, module: nn.Module, *given: Tensor) -> None:
    for found, wanted in zip(train(layer, module, *given), train(module, module, *given), strict=True):
        assert_close(found.detach(), wanted.detach())
        assert found.grad_fn is None or found.stride() == wanted.stride()  # gradients may have any


@pytest.mark.parametrize("name", quick(LAYERS, "lstm-projected", "gru"))
def test_one_graph_as_eager(name: str, recorder: Recorder) -> None:
    make, settings, dtype = LAYERS[name]
    torch.manual_seed(0)
    module = make(5, 8, **settings, dtype=dtype)
    compiled = torch.compile(module, backend="dynaxla", fullgraph=True)
    with recorder.expect(graphs=2, compiles=2, eager_ops=0):
        check(compiled, module, torch.randn(6, 3, 5, dtype=dtype))


@pytest.mark.long
@pytest.mark.parametrize("name", ["lstm", "gru", "tanh"])
def test_initial_states_and_inputs_without_a_batch(name: str, recorder: Recorder) -> None:
    make, settings, _ = LAYERS[name]
    directions = 2 if settings.get("bidirectional") else 1
    module = make(5, 8, **settings)
    states = [torch.randn(2 * directions, 4, 8) for _ in range(2 if name == "lstm" else 1)]
    x = torch.randn(4, 6, 5) if settings.get("batch_first") else torch.randn(6, 4, 5)
    with recorder.expect(graphs=4, eager_ops=0):
        check(torch.compile(module, backend="dynaxla", fullgraph=True), module, x, *states)
        check(
            torch.compile(module, backend="dynaxla", fullgraph=True),
            module,
            torch.randn(6, 5),
            *(s[:, 0] for s in states),
        )


@pytest.mark.parametrize("make", quick([nn.LSTM, nn.GRU], nn.LSTM))
def test_batch_and_length_are_in_buckets(make: Any, recorder: Recorder) -> None:
    """The last states are those of the true last step; the reverse direction begins at it."""
    module = make(5, 8, bidirectional=True, batch_first=True)
    compiled = torch.compile(module, backend="dynaxla", fullgraph=True, dynamic=True)
    with recorder.expect(graphs=2, compiles=2, eager_ops=0):
        for batch, length in ((6, 9), (5, 12), (7, 14)):
            check(compiled, module, torch.randn(batch, length, 5))


def test_dropout_between_layers_is_drawn() -> None:
    """torch's own decomposition leaves it out."""
    module = nn.LSTM(5, 8, 2, dropout=1.0)
    compiled = torch.compile(module, backend="dynaxla", fullgraph=True)
    x = torch.randn(6, 3, 5)
    with torch.no_grad():
        assert_close(compiled(x)[0], module(x)[0])


def test_programs_loop_over_time() -> None:
    """Of any length, there is one loop in a program, and not a copy of a step for each element."""
    for length in (5, 500):
        operands = torch.zeros(length, 2, 16), torch.zeros(2, 8), [torch.zeros(16, 4)]
        gates, state, (weight,) = operands
        arrays = (gates.numpy(), state.numpy(), [weight.numpy()])
        forward = jax.make_jaxpr(lambda g, s, w: recurrence(g, s, w, "lstm"))(*arrays)
        states = torch.zeros(length, 2, 8).numpy()
        back = jax.make_jaxpr(lambda d, g, s, w: recurrence_backward(d, d, g, s, w, "lstm"))(states, *arrays)
        for program in (forward, back):
            names = [equation.primitive.name for equation in program.eqns]
            assert names.count("scan") == 1
            assert len(names) < 40


def test_gradients_of_the_op_in_eager() -> None:
    """A graph that eager PyTorch runs calls the op itself."""
    for kind, gates, state, shapes in (
        ("lstm", 8, 4, [(8, 2)]),
        ("lstm", 8, 3, [(8, 1), (1, 2)]),
        ("gru", 6, 2, [(6, 2), (6,)]),
        ("tanh", 2, 2, [(2, 2)]),
    ):

        def run(given: Tensor, first: Tensor, *weights: Tensor, kind: str = kind) -> Tensor:
            return RECURRENCE(given, first, list(weights), kind)

        operands = [torch.randn(size, dtype=torch.float64) for size in ((3, 2, gates), (2, state), *shapes)]
        assert torch.autograd.gradcheck(run, [each.requires_grad_() for each in operands])


@pytest.mark.parametrize("make", quick([nn.GRU, nn.RNN], nn.GRU))
def test_autocast_gives_the_dtypes_of_eager(make: Any, recorder: Recorder) -> None:
    module, x = make(5, 8), torch.randn(6, 3, 5)
    compiled = torch.compile(module, backend="dynaxla", fullgraph=True)
    with recorder.expect(eager_ops=0), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for found, wanted in zip(compiled(x), module(x), strict=True):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, atol=3e-2, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_one_graph(make: Any, recorder: Recorder) -> None:
    cell, x = make(5, 8), torch.randn(3, 5)
    with recorder.expect(graphs=1, eager_ops=0):
        found = torch.compile(cell, backend="dynaxla", fullgraph=True)(x)
    for mine, wanted in zip(tree_leaves(found), tree_leaves(cell(x)), strict=True):
        assert_close(mine.detach(), wanted.detach())


@pytest.mark.long
def test_packed_sequences_end_the_graph_and_are_right(recorder: Recorder) -> None:
    rnn, head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x * 2, lengths, batch_first=True, enforce_sorted=False)
        return head(pad_packed_sequence(rnn(packed)[0], batch_first=True)[0])

    x, lengths = torch.randn(4, 6, 5), torch.tensor([3, 6, 1, 4])
    before = recorder.snapshot()
    assert_close(torch.compile(run, backend="dynaxla")(x, lengths).detach(), run(x, lengths).detach())
    captured = recorder.snapshot().captured[len(before.captured) :]
    assert "pack_padded_sequence" in str(captured[0])
