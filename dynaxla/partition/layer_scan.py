"""Layers that follow each other: calls of one sub-graph on weights of their own become one loop over stacked weights.

XLA inlines calls, so a loop is what makes many layers compile in the time of one. Stacked weights depend on weights alone: they
are made once per weight version, and a turn of the loop reads its own where they lie.
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

FEWEST = 4  # shorter chains compile fast as they are
_SCAN = torch.ops.higher_order.scan


@dataclass(frozen=True, slots=True)
class _Roles:
    """What becomes of the operands, by position.

    Attributes:
        carried: those that are a result of the call in front, with that result's index.
        stacked: those that are a weight of each call's own.
        shared: those that are the same for every call.
    """

    carried: dict[int, int]
    stacked: list[int]
    shared: list[int]


def chain_calls(module: GraphModule, weights: Collection[Node], takes: Callable[[Node], bool]) -> None:
    """Makes a `scan` of every chain of at least `FEWEST` calls, in place.

    Args:
        module: a functional graph of fixed sizes.
        weights: the placeholders that keep their values between most calls.
        takes: whether a call can be compiled.
    """
    for number, chain in enumerate(_chains(module)):
        roles = _roles(chain, weights) if len(chain) >= FEWEST and takes(chain[0]) else None
        if roles is not None:
            _replace(module, chain, roles, f"chained_{number}")


def _chains(module: GraphModule) -> list[list[Node]]:
    """Calls of one sub-graph that follow each other; what a call gives is read by the next one only."""
    chains: list[list[Node]] = []
    for node in module.graph.nodes:
        if node.target is not INVOKE:
            continue
        before = chains[-1][-1] if chains else None
        goes_on = before is not None and submodule(module, before.args[0]) is submodule(module, node.args[0])
        if goes_on and all(set(pick.users) <= {node} for pick in before.users):  # type: ignore[union-attr]
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def _roles(chain: Sequence[Node], weights: Collection[Node]) -> _Roles | None:
    """None if the calls are not turns of one loop."""
    carried = _carried(chain[0], chain[1])
    roles = _Roles(carried, [], [])
    if not carried or any(_carried(*pair) != carried for pair in itertools.pairwise(chain)):
        return None
    if any(_pick_index(pick) not in carried.values() for pick in chain[-1].users):
        return None
    for place in range(len(chain[0].args) - 2):
        operands = [call.args[2 + place] for call in chain]
        if place in carried:
            if _spec(operands[0]) != _spec(operands[1]):
                return None
        elif all(x is operands[0] or (not isinstance(x, Node) and x == operands[0]) for x in operands):
            roles.shared.append(place)
        elif all(x in weights for x in operands) and len({_spec(x) for x in operands}) == 1:
            roles.stacked.append(place)
        else:
            return None
    return roles


def _carried(before: Node, after: Node) -> dict[int, int]:
    """The operands that are a result of the call in front, by position, with that result's index."""
    picks = {pick: _pick_index(pick) for pick in before.users}
    return {place: picks[x] for place, x in enumerate(after.args[2:]) if x in picks}  # type: ignore[index]


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
    setattr(module, name, GraphModule(called, _turn(called.graph, roles)))
    with graph.inserting_before(first):
        stacks = [_stack(graph, [call.args[2 + place] for call in chain]) for place in roles.stacked]  # type: ignore[misc]
        init, more = ([first.args[2 + place] for place in places] for places in (roles.carried, roles.shared))
        scan = graph.call_function(_SCAN, (graph.get_attr(name), init, stacks, tuple(more)))
        results = {index: i for i, index in enumerate(roles.carried.values())}
        scan.meta = {**last.meta, "val": tuple(last.meta["val"][index] for index in roles.carried.values())}
        picks = {index: graph.call_function(operator.getitem, (scan, i)) for index, i in results.items()}
    for index, pick in picks.items():
        pick.meta = {"val": last.meta["val"][index]}
    replace_picks(graph, last, [picks.get(index) for index in range(len(last.meta["val"]))])
    for call in reversed(chain[:-1]):
        replace_picks(graph, call, [first] * len(call.meta["val"]))  # nothing reads them any more


def _stack(graph: Graph, weights: list[Node]) -> Node:
    stack = graph.call_function(torch.ops.aten.stack.default, (weights,))
    value = weights[0].meta["val"]
    stack.meta = {"val": value.new_empty([len(weights), *value.shape])}
    return stack


def _turn(called: Graph, roles: _Roles) -> Graph:
    """One turn: carried values, weights and shared values in, carried values out."""
    turn = Graph()
    inputs = [n for n in called.nodes if n.op == "placeholder"]
    copies: dict[Node, Node] = {}
    for place in (*roles.carried, *roles.stacked, *roles.shared):
        copies[inputs[place]] = turn.node_copy(inputs[place])
    for node in called.nodes:
        if node.op in ("call_function", "get_attr"):
            copies[node] = turn.node_copy(node, copies.__getitem__)
    returned = results_of(called)
    turn.output([copies[returned[index]] for index in roles.carried.values()])  # type: ignore[index]
    return turn
