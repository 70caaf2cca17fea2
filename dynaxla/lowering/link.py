"""Links a graph of calls and the functions of these calls to one pure StableHLO module, ready for any PJRT compiler.

The module is text: a `main` that consists of calls, and the functions as they are cached. The module of a program on a mesh has
Shardy's annotations: the mesh, the shardings of arguments and of results where they are known, and constraints.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from dynaxla.custom_ops.constrain import CONSTRAIN, CONSTRAIN_LIKE, UNSHARD
from dynaxla.lowering.call_graph import (
    WORK,
    CallGraph,
    Handle,
    OpCall,
    Value,
    mark_joint,
    mlir_mesh,
    mlir_sharding,
    mlir_type,
)
from dynaxla.lowering.locations import define_locations, locate_nodes
from dynaxla.lowering.mesh_functions import read_constraint, write_for_mesh
from dynaxla.lowering.stablehlo_functions import StablehloFunction
from dynaxla.mesh import Mesh, Sharding
from dynaxla.runtime.executable_info import FRONTEND_ATTRIBUTES, NOT_INLINED
from dynaxla.types import TensorSpec


@dataclass(frozen=True, slots=True)
class LinkedModule:
    """A linked module.

    Attributes:
        program: StableHLO, and Shardy's annotations where it is for a mesh: what the graph computes, in equal texts for equal
            graphs.
        locations: definitions of the locations of the program's calls: where in the user's program they come from.
        function: the user's function, by which profiles name the program.
    """

    program: str
    locations: str
    function: str

    @property
    def text(self) -> str:
        """The module as MLIR reads it. Its name is its own, so that profiles tell programs of one function apart."""
        digest = hashlib.sha256(self.program.encode()).hexdigest()[:8]
        readable = re.sub(
            r"\W", "_", self.function, flags=re.ASCII
        )  # MLIR knows no other letters, and no digit in front
        return self.program.replace("module ", f"module @f_{readable}.{digest} ", 1) + self.locations

    @property
    def module(self) -> bytes:
        """The module as `Client.compile` takes it."""
        return self.text.encode()


def link(
    graph: CallGraph,
    functions: Mapping[str, StablehloFunction],
    function: str = "main",
    apart: Collection[Handle] = frozenset(),
) -> LinkedModule:
    """Links a graph with the functions of its calls, given by key.

    Args:
        function: the user's function, for profiles.
        apart: the calls of functions that XLA does not inline.

    Raises:
        ShardingError: a constraint names an axis that the graph's mesh lacks.
    """
    exact = _exact(graph, functions)
    mesh = None if graph.sharding is None else graph.sharding.mesh
    called: dict[str, str] = {}
    names = {value: f"%arg{i}" for i, value in enumerate((each, 0) for each in graph.inputs)}
    lines: list[str] = []
    for number, (node, (call, operands)) in enumerate(graph.calls.items()):
        constraint = None if mesh is None else _find_constraint(graph, call, operands, mesh)
        if constraint is not None:
            lines.append(f"    %{number} = {_constraint(call.tensors[0], names[operands[0]], constraint)}")
            names[node, 0] = f"%{number}"
            continue
        lowered = functions[call.key]
        given_name, given_text = (lowered.exact_name, lowered.exact) if node in exact else (lowered.name, lowered.text)
        name, text = locate_nodes(given_name, given_text, number)
        called[name] = write_for_mesh(text, mesh)
        several = f":{len(call.tensors)}" if len(call.tensors) != 1 else ""
        given = ", ".join(names[operand] for operand in operands)
        assigned = f"%{number}{several} = " if call.tensors else ""
        kept = _NOT_INLINED if node in apart else ""
        lines.append(f"    {assigned}func.call @{name}({given}){kept} : {call.type} loc(#call{number})")
        names.update({(node, i): f"%{number}#{i}" if several else f"%{number}" for i in range(len(call.tensors))})
    results = [(names[value], mlir_type(spec)) for value, spec in zip(graph.results, graph.result_specs, strict=True)]
    head, joint = _results(graph), [mark_joint(ranks)] if (ranks := graph.ranks) else []
    if joint:
        lines.append(WORK)
        results.append(("%work", "tensor<ui32>"))
        head = ", ".join([*([head] if head else []), "tensor<ui32>"])
    types = ", ".join(type for _, type in results)
    returned = f"    return {', '.join(name for name, _ in results)} : {types}" if types else "    return"
    main = "\n".join([f"  func.func public @main({_arguments(graph)}) -> ({head}) {{", *lines, returned, "  }"])
    declared = [] if mesh is None else [mlir_mesh(mesh)]
    program = "\n".join([*joint, _head(mesh), *declared, main, *called.values(), "}", ""])
    return LinkedModule(program, define_locations(graph, program), function)


_NOT_INLINED = ' {{{} = {{{} = "{}"}}}}'.format(FRONTEND_ATTRIBUTES, *NOT_INLINED)


def _head(mesh: Mesh | None) -> str:
    if mesh is None:
        return "module {"
    return f"module attributes {{mhlo.num_partitions = {mesh.size} : i32, mhlo.num_replicas = 1 : i32}} {{"


def _arguments(graph: CallGraph) -> str:
    """The arguments of `main` with their attributes: `tf.aliasing_output`, as JAX writes it, donates an input's memory to a
    result."""
    head = []
    for index, spec in enumerate(graph.inputs.values()):
        taken = [f"tf.aliasing_output = {graph.donated[index]} : i32"] if index in graph.donated else []
        attributes = _placed(None if graph.sharding is None else graph.sharding.inputs[index]) + taken
        head.append(f"%arg{index}: {mlir_type(spec)}{_braced(attributes)}")
    return ", ".join(head)


def _results(graph: CallGraph) -> str:
    shardings = [None] * len(graph.results) if graph.sharding is None else graph.sharding.results
    typed = zip(map(mlir_type, graph.result_specs), shardings, strict=True)
    return ", ".join(f"{its_type}{_braced(_placed(sharding))}" for its_type, sharding in typed)


def _placed(sharding: Sharding | None) -> list[str]:
    return [] if sharding is None else [f"sdy.sharding = #sdy.sharding{mlir_sharding(sharding)}"]


def _braced(attributes: list[str]) -> str:
    return f" {{{', '.join(attributes)}}}" if attributes else ""


def _find_constraint(graph: CallGraph, call: OpCall, operands: Sequence[Value], mesh: Mesh) -> Sharding | None:
    """The sharding that a call gives its operand; None if it is no such call, or what it names is no argument.

    Raises:
        ShardingError: a constraint names an axis that the mesh lacks.
    """
    if call.target is CONSTRAIN_LIKE:
        return _sharding_of_argument(graph, operands[1])
    if call.target not in (CONSTRAIN, UNSHARD):
        return None
    text = next(leaf for leaf in call.leaves if isinstance(leaf, str))
    if call.target is UNSHARD:
        given = _sharding_of_argument(graph, operands[0])
        return None if given is None else given.drop_axis(text)
    (spec,) = call.operands
    return read_constraint(text, len(spec.shape), mesh)


def _sharding_of_argument(graph: CallGraph, value: Value) -> Sharding | None:
    """How an argument, or an argument with its dims permuted, is sharded."""
    assert graph.sharding is not None
    handle, _ = value
    if handle in graph.inputs:
        return graph.sharding.inputs[list(graph.inputs).index(handle)]
    call, operands = graph.calls[handle]
    if call.target is not torch.ops.aten.permute.default:
        return None
    given = _sharding_of_argument(graph, operands[0])
    order = [leaf for leaf in call.leaves if isinstance(leaf, int)]
    return None if given is None else given.permute([dim % len(order) for dim in order])


def _constraint(spec: TensorSpec, operand: str, sharding: Sharding) -> str:
    return f"sdy.sharding_constraint {operand} {mlir_sharding(sharding)} : {mlir_type(spec)}"


def _exact(graph: CallGraph, functions: Mapping[str, StablehloFunction]) -> set[Handle]:
    """The calls with a quotient that reaches a step op or the caller through elementwise and data movement ops alone."""
    seen: set[Value] = set(graph.results)
    exact: set[Handle] = set()
    for node, (call, operands) in reversed(list(graph.calls.items())):
        flow = functions[call.key].flow
        if any((node, result) in seen for result in flow.quotients):
            exact.add(node)
        for index, results in enumerate(flow.passed):
            if index in flow.stepped or any((node, result) in seen for result in results):
                seen.add(operands[index])
    return exact
