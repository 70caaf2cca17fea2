"""What graphs of Dynamo's write to, and why writes to expanded tensors are not captured as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dynaxla.torch_api import graph_writes
from dynaxla.torch_api.fakes import captured_value, memory_of
from dynaxla.torch_api.input_memory import find_strided_inputs
from tests.torch_api.boundary import boundary

Function = Callable[..., Any]


def capture(function: Function, *args: torch.Tensor, dynamic: bool = False) -> GraphModule:
    """The first graph of a function."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Sequence[Any]) -> Function:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, dynamic=dynamic)(*args)
    return graphs[0]


@boundary("graph_writes.find_written_memory", "graph_writes.is_plain", "graph_writes.unwrap")
@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.mul_(2),
        lambda x, y: torch._foreach_add_([x], 1),
        lambda x, y: torch.add(y, 1, out=x),
        lambda x, y: torch.nn.functional.relu(x, True),
        lambda x, y: torch.nn.functional.relu(x, inplace=True),
        lambda x, y: x[0].__setitem__(0, 3.0),
        lambda x, y: torch.ops.aten.mul_.Tensor(x, y),
        lambda x, y: torch.vmap(lambda row: row.mul_(2))(x),
    ],
)
def test_what_is_written_to(write: Function) -> None:
    module = capture(lambda x, y: (write(x, y), x + y)[1], torch.ones(3, 3), torch.ones(3, 3))
    nodes = module.graph.find_nodes(op="placeholder")
    memories = {node.target: memory_of(captured_value(node)) for node in nodes}
    assert memories["L_x_"] in graph_writes.find_written_memory(module)
    assert memories["L_y_"] not in graph_writes.find_written_memory(module)


@boundary("graph_writes.writes_to_an_overlap", "graph_writes.find_parts", "graph_writes.name_of")
@pytest.mark.parametrize("dynamic", [False, True])
def test_aot_autograd_fills_an_expanded_tensor_with_another_number(dynamic: bool) -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).expand(3, 3).fill_(1.0) + 0

    def fill_a_row(x: torch.Tensor) -> torch.Tensor:
        y = (x * 1e8).expand(3, 3)
        y[1].fill_(1.0)
        return y + 0

    for function in (fill, fill_a_row):
        torch._dynamo.reset()
        wrong = torch.compile(function, backend="aot_eager", dynamic=dynamic)(torch.ones(3))
        assert not torch.equal(wrong, torch.ones(3, 3))
        assert torch.equal(function(torch.ones(3)), torch.ones(3, 3))
        assert graph_writes.writes_to_an_overlap(capture(function, torch.ones(3), dynamic=dynamic))


@boundary("graph_writes.writes_to_an_overlap", "graph_writes.find_parts")
def test_writes_to_what_is_not_expanded() -> None:
    x, row = torch.ones(3, 3), torch.ones(3)
    for function in (
        lambda x, row: row.expand(3, 3).sum(0, True).mul_(2) + x.t().mul_(2),
        lambda x, row: checkpoint(torch.sin, row.expand(3, 3), use_reentrant=False) + x,
        lambda x, row: torch.nn.functional.dropout(row.expand(3, 3), 0.5, True) + x,
        lambda x, row: (row.bool().expand(3, 3) & x.bool()) | (row.int().expand(3, 3) | 3).bool(),
        lambda x, row: torch.nn.functional.unfold(x[None, None], 2).mul_(2),
    ):
        assert not graph_writes.writes_to_an_overlap(capture(function, x, row))
    within = capture(
        lambda x, row: checkpoint(lambda y: y.sin().expand(3, 3).zero_(), row, use_reentrant=False), x, row
    )
    assert graph_writes.writes_to_an_overlap(within)


@boundary("graph_writes.has_overlap")
def test_elements_that_share_memory() -> None:
    x = torch.arange(24.0).view(4, 6)
    for value in (x, x.t(), x[::2, ::3], x[:1].expand(1, 6), x[:0].expand(3, 0, 6), x[0, 0], x.unfold(1, 2, 2)):
        assert not graph_writes.has_overlap(value)
    for value in (x[:1].expand(3, 6), x.unfold(1, 2, 1), x.as_strided((3, 3), (1, 1)), x[:, :1].expand(4, 2)):
        assert graph_writes.has_overlap(value)


@boundary("graph_writes.unsqueeze_written_expansions")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_batch_of_one_is_unsqueezed(dynamic: bool) -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        y = (x * torch.inf).expand(1, -1)
        y[:, 0] = 1.0
        return y + 0

    torch._dynamo.reset()
    assert torch.compile(fill, backend="aot_eager", dynamic=dynamic)(torch.ones(3)).isnan().any()
    module = capture(fill, torch.ones(3), dynamic=dynamic)
    graph_writes.unsqueeze_written_expansions(module)
    assert not module.graph.find_nodes(op="call_method", target="expand")
    assert not graph_writes.writes_to_an_overlap(module)


@boundary("input_memory.find_strided_inputs")
def test_inputs_that_are_viewed_by_strides() -> None:
    x, y = torch.ones(3, 3), torch.ones(2, 2)
    assert find_strided_inputs(capture(lambda x, y: x + y[0, 0], x, y)) == []
    (found,) = find_strided_inputs(capture(lambda x, y: x.t().as_strided((2, 2), (1, 1)) + y, x, y))
    assert found.shape == (3, 3)
    within = capture(lambda x, y: checkpoint(lambda x: x.as_strided((2, 2), (1, 1)), x, use_reentrant=False) + y, x, y)
    assert len(find_strided_inputs(within)) == 2


@boundary("graph_writes.writes_to_an_overlap")
@pytest.mark.parametrize(
    "view",
    [lambda y: y.unfold(0, 2, 3), lambda y: torch.meshgrid(y, torch.ones(1))[0], lambda y: torch.unsafe_chunk(y, 2)[1]],
)
@pytest.mark.filterwarnings("ignore:torch.meshgrid")
def test_views_through_which_aot_autograd_writes_otherwise(view: Function) -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        y = x * 1e8
        view(y).fill_(1.0)
        return y + 0

    x = torch.arange(1.0, 6.0)
    torch._dynamo.reset()
    assert not torch.equal(torch.compile(fill, backend="aot_eager")(x), fill(x))
    assert graph_writes.writes_to_an_overlap(capture(fill, x))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(fill, backend="dynaxla")(x), fill(x))


@boundary("graph_writes.drop_inactive_dropouts")
@pytest.mark.parametrize(
    "drop",
    [
        lambda x: torch.nn.functional.dropout(x, 0.5, False),
        lambda x: torch.nn.functional.dropout(x, p=0.0, training=True),
        lambda x: torch.dropout(x, 0.5, False),
        torch.nn.Dropout(0.5).eval(),
        lambda x: torch.nn.functional.dropout(x, 0.5, False, True),
    ],
)
def test_dropout_that_gives_its_operand(drop: Function) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        z = drop(y)
        z.add_(1)
        return y, z, drop(x)

    torch._dynamo.reset()
    x = torch.ones(3)
    y, z, same = torch.compile(function, backend="dynaxla")(x)
    assert y.tolist() == z.tolist() == [3, 3, 3]
    assert same is x
    y.fill_(5)
    assert z.tolist() == [5, 5, 5]
    module = capture(lambda x: checkpoint(lambda y: drop(y).sin(), x, use_reentrant=False), x)
    graph_writes.drop_inactive_dropouts(module)
    assert not [n for part in graph_writes.find_parts(module) for n in part.graph.nodes if "dropout" in str(n.target)]
