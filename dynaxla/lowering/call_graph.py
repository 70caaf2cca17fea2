"""A static graph as a list of calls of op overloads. Calls are plain values; equal calls are lowered once."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops.process_collectives import find_ranks
from dynaxla.errors import LoweringError
from dynaxla.mesh import Mesh, Sharding
from dynaxla.torch_api.overloads import OpOverload, stable_name
from dynaxla.torch_api.pytree import TreeSpec, tree_flatten, tree_unflatten
from dynaxla.types import DONATED, DTYPE_NAMES, TensorSpec

_ELEMENTS = DTYPE_NAMES | {
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.uint8: "ui8",
    torch.bool: "i1",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
}
"""MLIR's names of dtypes."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an op overload. Calls with equal keys are equal.

    Attributes:
        target: the overload.
        leaves: the flattened (args, kwargs), with a `TensorSpec` in place of each tensor operand, in operand order.
        treespec: how the leaves unflatten to (args, kwargs).
        results: the specs of the results, by torch; None for each result that is not a tensor.
        key: all of the above as text.
    """

    target: OpOverload
    leaves: tuple[Any, ...]
    treespec: TreeSpec
    results: tuple[TensorSpec | None, ...]
    key: str = field(init=False)

    def __post_init__(self) -> None:
        # As text: as values, 1 and True and 1.0 would be equal.
        key = repr((stable_name(self.target), tree_unflatten(list(self.leaves), self.treespec), self.results))
        object.__setattr__(self, "key", key)

    @property
    def name(self) -> str:
        """An MLIR symbol name, derived from the key, so that it is the same in every process."""
        readable = re.sub(r"[^\w.]", "_", stable_name(self.target))  # it is a function where a backward runs by itself
        return f"{readable}.{hashlib.sha256(self.key.encode()).hexdigest()[:32]}"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments, with specs in place of tensors."""
        return tuple(tree_unflatten(list(self.leaves), self.treespec)[0])

    @property
    def operands(self) -> tuple[TensorSpec, ...]:
        """The specs of the tensor operands."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The specs of the results that are tensors."""
        return tuple(spec for spec in self.results if spec is not None)

    @property
    def type(self) -> str:
        """The MLIR text of the type of a function from the operands to the tensor results."""
        return f"({_types(self.operands)}) -> ({_types(self.tensors)})"


def op_call(node: Node) -> tuple[OpCall, list[Node]]:
    """Converts a node to a call, and returns the nodes of its tensor operands."""
    leaves, treespec = tree_flatten((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, Node)]
    specs = tuple(TensorSpec.from_tensor(x.meta["val"]) if isinstance(x, Node) else x for x in leaves)
    values = node.meta["val"]
    results = values if isinstance(values, (tuple, list)) else (values,)
    found = tuple(TensorSpec.from_tensor(v) if isinstance(v, torch.Tensor) else None for v in results)
    return OpCall(node.target, specs, treespec, found), operands  # type: ignore[arg-type]


Handle: TypeAlias = Node | str | int
Value: TypeAlias = tuple[Handle, int]
"""(input, 0), or (call, index among the call's tensor results)."""


@dataclass(frozen=True, slots=True)
class GraphSharding:
    """How the values of a graph are sharded over a mesh.

    Attributes:
        mesh: the mesh.
        inputs: the sharding of each input.
        results: the sharding of each result; None: XLA chooses.
        ranks: the processes that have the mesh, if they are several.
    """

    mesh: Mesh
    inputs: tuple[Sharding, ...]
    results: tuple[Sharding | None, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallGraph:
    """A static graph.

    Attributes:
        inputs: the graph's inputs with their specs.
        calls: in order, the nodes that call an overload, each with its call and its operands.
        results: the returned values.
        distinct: the distinct calls by key, each with one node that makes it.
        donated: indices of the inputs that are donated, each with the index of the result that reuses its memory.
        sharding: of the inputs and results; None: the program is for one device.
    """

    inputs: Mapping[Handle, TensorSpec]
    calls: Mapping[Handle, tuple[OpCall, tuple[Value, ...]]]
    results: tuple[Value, ...]
    distinct: Mapping[str, tuple[OpCall, Node]]
    donated: Mapping[int, int] = field(default_factory=dict)
    sharding: GraphSharding | None = None

    @property
    def devices(self) -> int:
        """How many devices compute it."""
        return 1 if self.sharding is None else self.sharding.mesh.size

    @property
    def listing(self) -> tuple[object, ...]:
        """The graph without its node handles, for comparison and hashing: graphs with equal listings compute the same."""
        numbers = {handle: number for number, handle in enumerate((*self.inputs, *self.calls))}
        return (
            tuple(map(mlir_type, self.inputs.values())),
            tuple((call.key, tuple((numbers[n], i) for n, i in given)) for call, given in self.calls.values()),
            tuple((numbers[n], i) for n, i in self.results),
            *([tuple(self.donated.items())] if self.donated else []),
            *([self.sharding] if self.sharding is not None else []),
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes that run the program together; none: it is a program of this one alone."""
        found = {find_ranks(call.target, call.arguments) for call, _ in self.distinct.values()} - {None}
        return next((tuple(ranks) for ranks in found if ranks), () if self.sharding is None else self.sharding.ranks)

    @property
    def result_specs(self) -> list[TensorSpec]:
        """The specs of the results."""
        return [self.inputs[n] if n in self.inputs else self.calls[n][0].tensors[i] for n, i in self.results]


def call_graph(graph: Graph) -> CallGraph:
    """Converts a static, functional graph to calls. Every tensor node needs a fake or real tensor in `meta["val"]`.

    Raises:
        LoweringError: a node calls something other than an op overload.
    """
    inputs: dict[Handle, TensorSpec] = {}
    calls: dict[Handle, tuple[OpCall, tuple[Value, ...]]] = {}
    values: dict[Node, Value] = {}
    distinct: dict[str, tuple[OpCall, Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs[node] = TensorSpec.from_tensor(node.meta["val"])
            values[node] = (node, 0)
        elif node.target is operator.getitem:
            source, index = node.args
            values[node] = (source, _position(calls[source][0], index))
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            call, operands = op_call(node)
            calls[node] = (call, tuple(values[operand] for operand in operands))
            values[node] = (node, 0)
            distinct.setdefault(call.key, (call, node))
        elif node.op != "output":
            raise LoweringError(f"{node.format_node()} is no call of an overload", "report the graph")
    returned: Any = graph.output_node().args[0]
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    donated = {
        i: node.meta[DONATED] for i, node in enumerate(graph.find_nodes(op="placeholder")) if DONATED in node.meta
    }
    return CallGraph(inputs, calls, tuple(values[result] for result in results), distinct, donated)


def _position(call: OpCall, index: int) -> int:
    """The index of a result among the tensor results."""
    return sum(spec is not None for spec in call.results[:index])


def mlir_type(spec: TensorSpec) -> str:
    """The MLIR text of a tensor's type."""
    return f"tensor<{''.join(f'{n}x' for n in spec.shape)}{_ELEMENTS[spec.dtype]}>"


def mlir_sharding(sharding: Sharding) -> str:
    """The MLIR text of a sharding over the module's mesh, which has the symbol @mesh."""
    dims = ", ".join("{" + ", ".join(f'"{axis}"' for axis in axes) + "}" for axes in sharding.dims)
    return f"<@mesh, [{dims}]>"


def mlir_mesh(mesh: Mesh) -> str:
    """The MLIR text that declares a module's mesh."""
    axes = ", ".join(f'"{axis}"={size}' for axis, size in zip(mesh.axes, mesh.shape, strict=True))
    return f"  sdy.mesh @mesh = <[{axes}]>"


WORK = """\
    %work0 = stablehlo.replica_id : tensor<ui32>
    %work1 = stablehlo.broadcast_in_dim %work0, dims = [] : (tensor<ui32>) -> tensor<4096xui32>
    %work2 = stablehlo.iota dim = 0 : tensor<4096xui32>
    %work3 = stablehlo.xor %work1, %work2 : tensor<4096xui32>
    %work4 = stablehlo.constant dense<0> : tensor<ui32>
    %work = stablehlo.reduce(%work3 init: %work4) applies stablehlo.maximum across dimensions = [0] \
: (tensor<4096xui32>, tensor<ui32>) -> tensor<ui32>"""
"""A microsecond of work, the last result of a module of several processes (`runtime.joint_programs.JointExecutable`)."""


def mark_joint(ranks: tuple[int, ...], name: str = "") -> str:
    """The line that a module of several processes begins with (`runtime.executable_info.processes_of`).

    Args:
        name: of the program in errors.
    """
    return f"// joint {','.join(map(str, ranks))}{name and ' '}{name}"


def _types(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(map(mlir_type, specs))
