"""Where in the user's program the calls of a module come from, as MLIR's locations: XLA keeps them as metadata of its
instructions, and profiles show them.

The location of call 12 is `loc("layers.0.attention/addmm.12"("model.py":40:0))`, and XLA gives it to what the function's body
becomes. The number names the call within its graph (`find_call`), also in an executable that another process compiled of an
equal graph; the file and the line are those of that process's program.

The function of a loop, a branch or any other call with sub-graphs says of its operations which node they compute
(`SCOPE`). Each call of it gets a copy of its own (`locate_nodes`), in which node 5 of the first sub-graph of
call 7 has `loc(":layers.0/mm.7_0_5"("model.py":11:0))`. XLA puts the call's name before it: "while_loop.7/:layers.0/mm.7_0_5".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from dynaxla.diagnostics import SourceLine, source_line
from dynaxla.fx.graph_utils import list_subgraphs
from dynaxla.lowering.call_graph import CallGraph
from dynaxla.torch_api.overloads import REGIONS, HigherOrderOperator, OpOverload, base_name, namespace, stable_name
from dynaxla.types import MODULE_PATH

SCOPE = "at"
"""What the names of the scopes begin with in which JAX traces the nodes of sub-graphs: "at_0_5" is node 5 of the call's first
sub-graph, "at_0_5_1_3" node 3 of the second one that this node calls."""

_NUMBER = re.compile(r"\.(\d+(?:_\d+)*)$")
_NODE = re.compile(rf'loc\("{SCOPE}((?:_\d+)+)"\)')
_CALL = re.compile(r"loc\(#call(\w+)\)")
_BACKWARD = "/backward"


@dataclass(frozen=True, slots=True)
class LocatedNode:
    """A node of a graph, or of a sub-graph.

    Attributes:
        node: the node.
        number: its own in the graph, "7"; "7_0_5" is node 5 of the first sub-graph of node 7.
        module: path of the user's module; "" for none.
        line: of the user's program; None where it has none.
    """

    node: Node
    number: str
    module: str = ""
    line: SourceLine | None = None

    @property
    def op(self) -> str:
        return shorten_op(self.node.target)

    @property
    def location(self) -> str:
        """As MLIR takes it."""
        own = f"{self.module}/{self.op}.{self.number}" if self.module else f"{self.op}.{self.number}"
        name = _quote(f":{own}" if "_" in self.number else own)
        return name if self.line is None else f"{name}({_quote(self.line.file)}:{self.line.line}:0)"


def define_locations(graph: CallGraph, program: str) -> str:
    """The definitions of the locations that a program of the graph's calls names, by their numbers."""
    known: dict[str, str] = {}
    for number, (handle, (call, _)) in enumerate(graph.calls.items()):
        if isinstance(handle, Node):
            known |= {each.number: each.location for each in locate(handle, number)}
        else:
            known[str(number)] = _quote(f"{shorten_op(call.target)}.{number}")
    return "".join(
        f"#call{each} = loc({known.get(each, 'unknown')})\n" for each in dict.fromkeys(_CALL.findall(program))
    )


def locate_nodes(name: str, text: str, call: int) -> tuple[str, str]:
    """The function of one call, where its operations say which nodes they compute: a symbol and a text with locations of the
    call's own. Any other function is all calls'."""
    if _NODE.search(text) is None:
        return name, text
    own = f"call{call}.{name}"
    return own, _NODE.sub(rf"loc(#call{call}\1)", text.replace(f"@{name}", f"@{own}"))


def split_name(name: str) -> tuple[str, str]:
    """The `op_name` of an instruction of XLA, split: the call with the sub-graphs that it is within, "" for none; its own."""
    outer, _, own = f"/{name}".rpartition("/:")
    return outer.partition("/:")[0].removeprefix("/"), own.removeprefix("/")


def find_call(name: str) -> str | None:
    """The number of the call that an instruction of XLA comes from, by the `op_name` of its metadata; None for others. That of
    a node of a sub-graph, "7_0_5", begins with the call's."""
    found = _NUMBER.search(name)
    return None if found is None else found[1]


def shorten_op(target: Any) -> str:
    """ "addmm" of aten.addmm.default, "while_loop" of a higher-order operator and of what it became."""
    if isinstance(target, HigherOrderOperator):
        return str(target.name())
    if not isinstance(target, OpOverload):
        return str(getattr(target, "__name__", target))
    if namespace(target) == REGIONS:
        return base_name(target).rpartition("_")[0]
    return stable_name(target).split(".")[-2 if "." in stable_name(target) else 0]


def locate(node: Node, number: int) -> Iterator[LocatedNode]:
    """A node of a graph, and the nodes of its sub-graphs that call something."""
    yield from _locate(node, str(number), LocatedNode(node, ""), "")


def _locate(node: Node, number: str, outer: LocatedNode, layer: str) -> Iterator[LocatedNode]:
    """As `locate`.

    Args:
        outer: the call that it is within, whose module and line it has where it has none of its own.
        layer: the module whose sub-graph it is in, where several share one.
    """
    own = node.meta.get(MODULE_PATH, "")
    is_known = own.removesuffix(_BACKWARD.removeprefix("/")) != ""  # torch drops the modules of a branch's gradient
    module = _move(own, layer) if is_known else outer.module or own
    located = LocatedNode(node, number, module, source_line(node) or outer.line)
    yield located
    if located.op == "invoke_subgraph":
        layer = module.removesuffix(_BACKWARD)
    for position, graph in enumerate(list_subgraphs(node)):
        for inner, each in enumerate(graph.graph.nodes):
            if each.op == "call_function":
                yield from _locate(each, f"{number}_{position}_{inner}", located, layer)


def _move(module: str, layer: str) -> str:
    """A module of the layer for which a shared sub-graph was captured, as a module of this layer: "layers.0.mlp" in "layers.3"
    is "layers.3.mlp"."""
    depth = layer.count(".") + 1
    first = ".".join(module.removesuffix(_BACKWARD).split(".")[:depth])
    is_like = re.sub(r"\d+", "", first) == re.sub(r"\d+", "", layer)
    return layer + module.removeprefix(first) if layer and is_like else module


def _quote(text: str) -> str:
    """MLIR's literal of a text: bytes that are no printable ASCII are two hex digits behind a backslash."""
    safe = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in text.encode(errors="replace"))
    return f'"{"".join(safe)}"'
