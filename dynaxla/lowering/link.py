"""Links a graph of calls and the functions of these calls to one pure StableHLO module, ready for any PJRT compiler.

The module is text: a `main` that consists of calls, and the functions as they are cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynaxla.lowering.call_graph import CallGraph, Handle, Value, mlir_type
from dynaxla.lowering.stablehlo_functions import StablehloFunction


@dataclass(frozen=True, slots=True)
class LinkedModule:
    """A linked module.

    Attributes:
        text: pure StableHLO.
    """

    text: str

    @property
    def module(self) -> bytes:
        """The module as `Client.compile` takes it."""
        return self.text.encode()


def link(graph: CallGraph, functions: Mapping[str, StablehloFunction]) -> LinkedModule:
    """Links a graph with the functions of its calls, given by key."""
    exact = _exact(graph, functions)
    called: dict[str, str] = {}
    names = {value: f"%arg{i}" for i, value in enumerate((each, 0) for each in graph.inputs)}
    lines: list[str] = []
    for number, (node, (call, operands)) in enumerate(graph.calls.items()):
        function = functions[call.key]
        name, text = (function.exact_name, function.exact) if node in exact else (function.name, function.text)
        called[name] = text
        several = f":{len(call.tensors)}" if len(call.tensors) != 1 else ""
        given = ", ".join(names[operand] for operand in operands)
        assigned = f"%{number}{several} = " if call.tensors else ""
        lines.append(f"    {assigned}func.call @{name}({given}) : {call.type}")
        names.update({(node, i): f"%{number}#{i}" if several else f"%{number}" for i in range(len(call.tensors))})
    head = ", ".join(f"%arg{i}: {mlir_type(s)}{_taken(graph, i)}" for i, s in enumerate(graph.inputs.values()))
    types = ", ".join(map(mlir_type, graph.result_specs))
    returned = f"    return {', '.join(names[value] for value in graph.results)} : {types}" if types else "    return"
    main = "\n".join([f"  func.func public @main({head}) -> ({types}) {{", *lines, returned, "  }"])
    return LinkedModule("\n".join(["module {", main, *called.values(), "}", ""]))


def _taken(graph: CallGraph, index: int) -> str:
    """The argument attribute that donates an input's memory to a result (`tf.aliasing_output`, as JAX writes it)."""
    return f" {{tf.aliasing_output = {graph.donated[index]} : i32}}" if index in graph.donated else ""


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
