"""Graphs of tensors on a mesh: gradients are sharded as their parameters, and fully sharded parameters are gathered for use.

Which inputs are on a mesh is what the capture found. How they are sharded, each program reads off its own arguments: one graph
serves every mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops.constrain import CONSTRAIN_LIKE, UNSHARD
from dynaxla.fx.batched_products import keep_stacks_apart
from dynaxla.targets.registry import mesh_devices
from dynaxla.torch_api.aot import PART_OF_JOINT, is_backward, mark_backward, written_inputs
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.types import DEVICE_TYPE

aten = torch.ops.aten
_REMADE = frozenset(
    {
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.unsqueeze.default),
        *(aten.squeeze.dim, aten.expand.default, aten.slice.Tensor, aten.select.int, aten._to_copy.default),
        torch.ops.prims.convert_element_type.default,
    }
)
"""Ops on a gathered parameter that the backward repeats, as the forward would else keep all of the parameter for it."""


@dataclass(frozen=True, slots=True)
class InputPlacement:
    """Which inputs of a graph are on a mesh.

    Attributes:
        differentiated: by position, whether the input is on a mesh and gets a gradient.
        gathered: by position of a fully sharded parameter, the axis over which it is split.
    """

    differentiated: tuple[bool, ...] = ()
    gathered: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Sequence[object]) -> InputPlacement:
        """That of the values of a graph's first call."""
        devices = mesh_devices()
        if devices is None or not devices.in_use:
            return cls()
        tensors = [x if isinstance(x, torch.Tensor) and x.device.type == DEVICE_TYPE else None for x in inputs]
        placed = tuple(x is not None and devices.find_sharding(x) is not None for x in tensors)
        gathered = {i: devices.gathered[x] for i, x in enumerate(tensors) if placed[i] and x in devices.gathered}
        return cls(tuple(on and x.requires_grad for on, x in zip(placed, tensors, strict=True)), gathered)  # type: ignore[union-attr]

    @property
    def listing(self) -> str:
        """The placement as a part of keys."""
        return repr((self.differentiated, sorted(self.gathered.items()))) if self.differentiated else ""

    def rewrite_inference(self, graph: Graph) -> None:
        """Has a graph without a backward gather its parameters."""
        if self.differentiated:
            keep_stacks_apart(graph)
        if self.gathered:
            self._gather(graph, graph.find_nodes(op="placeholder"))

    def rewrite_joint(self, graph: Graph, num_fwd_outputs: int) -> None:
        """Has a joint graph gather its parameters, twice, and shard its gradients as what they are the gradients of."""
        if self.differentiated:
            keep_stacks_apart(graph)  # before what the forward saves is chosen
        primals = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("primals")]
        if len(primals) != len(self.differentiated):
            return
        output = graph.output_node()
        returned: Any = output.args[0]
        results = list(returned)
        written = {primals[place] for place in written_inputs(graph)}
        for place, (primal, wanted) in enumerate(zip(primals, self.differentiated, strict=True), start=num_fwd_outputs):
            gradient = results[place] if place < len(results) else None
            wanted = wanted and primal not in written  # the backward would save it, which autograd refuses
            if wanted and isinstance(gradient, Node) and isinstance(gradient.meta.get("val"), torch.Tensor):
                results[place] = _call(graph, output, CONSTRAIN_LIKE, (gradient, primal), gradient.meta["val"])
                mark_backward(results[place])
        output.args = (type(returned)(results),)
        self._gather(graph, primals)

    def _gather(self, graph: Graph, inputs: Sequence[Node]) -> None:
        for place, axis in self.gathered.items():
            parameter = inputs[place]
            users = [user for user in parameter.users if user.target is not CONSTRAIN_LIKE and user.op != "output"]
            forward = [user for user in users if not is_backward(user)]
            backward = [user for user in users if is_backward(user)]
            for readers in (forward, backward):
                if readers:
                    made = _call(graph, min(readers), UNSHARD, (parameter, axis), parameter.meta["val"])
                    made.meta |= {PART_OF_JOINT: readers[0].meta.get(PART_OF_JOINT)}
                    for reader in readers:
                        reader.replace_input_with(parameter, made)
            _remake_in_backward(graph, parameter)


def _remake_in_backward(graph: Graph, parameter: Node) -> None:
    """Repeats what the backward reads of a gathered parameter."""
    derived = {node for node in parameter.users if node.target is UNSHARD and not is_backward(node)}
    for node in list(graph.nodes):
        if node.target in _REMADE and not is_backward(node) and derived.issuperset(node.all_input_nodes):
            derived.add(node)
    for node in [node for node in graph.nodes if node in derived]:
        readers = [user for user in node.users if is_backward(user)]
        if readers:
            copied = _copy_chain(graph, node, min(readers))
            for reader in readers:
                reader.replace_input_with(node, copied)


def _copy_chain(graph: Graph, node: Node, before: Node) -> Node:
    """A copy of a node and of what makes it of the parameter, in the backward."""
    operands = {} if node.target is UNSHARD else {x: _copy_chain(graph, x, before) for x in node.all_input_nodes}
    with graph.inserting_before(before):
        made = graph.node_copy(node, lambda x: operands.get(x, x))
    mark_backward(made)
    return made


def _call(graph: Graph, before: Node, op: OpOverload, args: tuple[Any, ...], value: Any) -> Node:
    with graph.inserting_before(before):
        made = graph.call_function(op, args)
    made.meta["val"] = value
    return made
