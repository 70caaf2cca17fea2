"""Turns successive layers into a loop: calls of one sub-graph on different weights become a `scan` over stacked weights.

XLA inlines calls, so only a loop makes many layers compile in the time of one. Stacked weights depend on weights alone:
they are computed once per weight version, and each iteration reads its slice in operand_index.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from dynaxla.fx.graph_utils import submodule
from dynaxla.partition.inline_subgraphs import INVOKE, replace_picks, results_of

FEWEST = 4  # shorter chains compile fast without a loop
_SCAN = torch.ops.higher_order.scan


@dataclass(frozen=True, slots=True)
class _Roles:
    """How the loop passes each operand, by position.

    Attributes:
        carried: operands that are results of the previous call, with the index of the result.
        stacked: operands that are a different weight in each call.
        shared: operands that are the same in every call.
    """

    carried: dict[int, int]
    stacked: list[int]
    shared: list[int]


def scan_layers(module: GraphModule, weights: Collection[Node], takes: Callable[[Node], bool]) -> None:
    """Replaces every chain of at least `FEWEST` calls by a `scan`, in operand_index.

    Args:
        module: a functional graph with static sizes.
        weights: the placeholders that keep their values between most calls.
        takes: whether a call can be compiled.
    """
    for number, chain in enumerate(_chains(module)):
        roles = _roles(chain, weights) if len(chain) >= FEWEST and takes(chain[0]) else None
        if roles is not None:
            _replace(module, chain, roles, f"chained_{number}")


def _chains(module: GraphModule) -> list[list[Node]]:
    """Returns chains of successive calls of one sub-graph, where only the next call reads a call's results."""
    chains: list[list[Node]] = []
    for node in module.graph.nodes:
        if node.target is not INVOKE:
            continue
        before = chains[-1][-1] if chains else None
        continues = before is not None and submodule(module, before.args[0]) is submodule(module, node.args[0])
        if continues and all(set(pick.users) <= {node} for pick in before.users):  # type: ignore[union-attr]
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def _roles(chain: Sequence[Node], weights: Collection[Node]) -> _Roles | None:
    """Returns the roles of the operands; None if the calls are not iterations of one loop."""
    carried = _carried(chain[0], chain[1])
    roles = _Roles(carried, [], [])
    if not carried or any(_carried(*pair) != carried for pair in itertools.pairwise(chain)):
        return None
    if any(_pick_index(pick) not in carried.values() for pick in chain[-1].users):
        return None
    for operand_index in range(len(chain[0].args) - 2):
        operands = [call.args[2 + operand_index] for call in chain]
        if operand_index in carried:
            if _spec(operands[0]) != _spec(operands[1]):
                return None
        elif all(x is operands[0] or (not isinstance(x, Node) and x == operands[0]) for x in operands):
            roles.shared.append(operand_index)
        elif all(x in weights for x in operands) and len({_spec(x) for x in operands}) == 1:
            roles.stacked.append(operand_index)
        else:
            return None
    return roles


def _carried(before: Node, after: Node) -> dict[int, int]:
    """Returns the operands that are results of the previous call, by position, with the index of the result."""
    picks = {pick: _pick_index(pick) for pick in before.users}
    return {operand_index: picks[x] for operand_index, x in enumerate(after.args[2:]) if x in picks}  # type: ignore[index]


def _pick_index(pick: Node) -> int:
    assert pick.target is operator.getitem
    return pick.args[1]  # type: ignore[return-value]


def _spec(value: Argument) -> object:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return (tensor.dtype, tuple(tensor.shape)) if isinstance(tensor, torch.Tensor) else None


def _replace(module: GraphModule, chain: Sequence[Node], roles: _Roles, name: str) -> None:
    graph, first, last = module.graph, chain[0], chain[-1]
    called = submodule(module, first.args[0])
    assert called is not None
    setattr(module, name, GraphModule(called, _make_iteration(called.graph, roles)))
    with graph.inserting_before(first):
        stacks = [_stack(graph, [call.args[2 + operand_index] for call in chain]) for operand_index in roles.stacked]  # type: ignore[misc]
        init, more = (
            [first.args[2 + operand_index] for operand_index in places] for places in (roles.carried, roles.shared)
        )
        scan = graph.call_function(_SCAN, (graph.get_attr(name), init, stacks, tuple(more)))
        results = {index: i for i, index in enumerate(roles.carried.values())}
        scan.meta = {**last.meta, "val": tuple(last.meta["val"][index] for index in roles.carried.values())}
        picks = {index: graph.call_function(operator.getitem, (scan, i)) for index, i in results.items()}
    for index, pick in picks.items():
        pick.meta = {"val": last.meta["val"][index]}
    replace_picks(graph, last, [picks.get(index) for index in range(len(last.meta["val"]))])
    for call in reversed(chain[:-1]):
        replace_picks(graph, call, [first] * len(call.meta["val"]))  # they have no users left


def _stack(graph: Graph, weights: list[Node]) -> Node:
    stack = graph.call_function(torch.ops.aten.stack.default, (weights,))
    value = weights[0].meta["val"]
    stack.meta = {"val": value.new_empty([len(weights), *value.shape])}
    return stack


def _make_iteration(called: Graph, roles: _Roles) -> Graph:
    """Makes the graph of one iteration: carried values, weights and shared values in, carried values out."""
    loop_body = Graph()
    inputs = [n for n in called.nodes if n.op == "placeholder"]
    copies: dict[Node, Node] = {}
    for operand_index in (*roles.carried, *roles.stacked, *roles.shared):
        copies[inputs[operand_index]] = loop_body.node_copy(inputs[operand_index])
    for node in called.nodes:
        if node.op in ("call_function", "get_attr"):
            copies[node] = loop_body.node_copy(node, copies.__getitem__)
    returned = results_of(called)
    loop_body.output([copies[returned[index]] for index in roles.carried.values()])  # type: ignore[index]
    return loop_body
