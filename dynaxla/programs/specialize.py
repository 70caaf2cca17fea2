"""A symbolic part at fixed sizes: plain integers for symbols, fake tensors recomputed, strides moved to the boundary.

XLA's arrays are row-major. A torch tensor that is a permutation of a row-major one (a transposed weight, a channels-last
image, a key-value cache seen as [batch, head, length, size]) is passed as what lies in memory, and the permutation
becomes part of the program; results get torch's strides the same way. Neither costs a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node, map_arg

from dynaxla.bucketing.size_expressions import Size, evaluate, is_fixed, size_of
from dynaxla.fx.permutations import Order, find_result_order, find_row_major_order, invert_permutation
from dynaxla.torch_api.fakes import FakeTensor, FakeTensorMode, mode_of
from dynaxla.torch_api.meta_kernels import run_meta_kernel
from dynaxla.torch_api.overloads import OpOverload, parameters
from dynaxla.types import ORIGIN, SOURCE, OutputSource, StaticGraph

aten = torch.ops.aten


def specialize(graph: Graph, arguments: Sequence[Any] | None, strided: Collection[int] = ()) -> StaticGraph:
    """Specializes a functional graph.

    Args:
        graph: the graph; every node has `meta["val"]`.
        arguments: for a symbolic graph the call's arguments (tensors, of which only sizes and strides are read, and
            plain integers), one per placeholder; None for a graph with no symbols.
        strided: the outputs that get torch's strides also where these leave gaps or repeat elements.
    """
    return _Specializer(graph, arguments, strided).run()


class _Specializer:
    def __init__(self, graph: Graph, arguments: Sequence[Any] | None, strided: Collection[int]) -> None:
        self._source = graph
        self._arguments = arguments
        self._strided = strided
        self._mode = FakeTensorMode() if arguments is not None else _mode_of(graph)
        self._graph = Graph()
        self._values: dict[Node, Any] = {}  # a node of the new graph, or a plain value
        self._inputs: dict[Node, int] = {}  # the placeholder's position, for every tensor placeholder
        self._orders: list[tuple[int, ...] | None] = []

    def run(self) -> StaticGraph:
        position = 0
        for node in self._source.nodes:
            if node.op == "placeholder":
                self._values[node] = self._placeholder(node, position)
                position += 1
            elif node.op == "call_function":
                self._values[node] = self._call(node)
        outputs = self._outputs(self._source.output_node().args[0])
        return StaticGraph(self._graph, tuple(self._orders), outputs)

    def _placeholder(self, node: Node, position: int) -> Any:
        value = node.meta["val"] if self._arguments is None else self._arguments[position]
        if not isinstance(value, torch.Tensor):
            return value
        fake = value if self._arguments is None else self._fake(value)
        order = find_row_major_order(fake)
        made = self._graph.placeholder(node.name)
        self._inputs[node] = len(self._orders)
        self._orders.append(order)
        if order is None:
            made.meta = {"val": fake}
            return made
        with self._mode:
            made.meta = {"val": fake.permute(order)}
        return self._add(aten.permute.default, (made, list(invert_permutation(order))), {}, {})

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        with self._mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _call(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        if not _holds_tensor(node.meta.get("val")):
            return node.target(*_plain(args), **_plain(kwargs))  # type: ignore[operator]
        return self._add(node.target, args, kwargs, {ORIGIN: node.name, **_kept_meta(node)})

    def _add(self, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> Node:
        made = self._graph.call_function(target, args, kwargs)
        made.meta = dict(meta)
        if self._arguments is not None or "val" not in meta:
            fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
            # A view whose strides only eager's memory format justifies is still a reshape of row-major values.
            runner = aten.reshape.default if target is aten.view.default else target
            made.meta["val"] = run_meta_kernel(self._mode, runner, fake_args, fake_kwargs)
        return made

    def _outputs(self, returned: Any) -> tuple[OutputSource, ...]:
        placeholders = {node: i for i, node in enumerate(n for n in self._source.nodes if n.op == "placeholder")}
        results: dict[tuple[Node, Order | None], int] = {}
        produced: list[Node] = []
        sources = []
        for place, item in enumerate(returned if isinstance(returned, (tuple, list)) else (returned,)):
            value = self._values[item] if isinstance(item, Node) else item
            if not isinstance(value, Node):
                sources.append(OutputSource(value=value))
            elif item in placeholders:
                sources.append(OutputSource(argument=placeholders[item]))
            else:
                is_strided = place in self._strided
                fake = self._as_captured(item, value.meta["val"]) if is_strided else value.meta["val"]
                sources.append(self._result(value, fake, is_strided, results, produced))
        self._graph.output(tuple(produced))
        return tuple(sources)

    def _as_captured(self, node: Node, fake: torch.Tensor) -> torch.Tensor:
        """A result with the strides that the source has for it.

        Fake kernels predict others at numbers than at symbols for some calls, and a pass writes some calls as others.
        """
        captured = node.meta["val"]
        if self._arguments is None or not all(map(self._is_known, (*captured.shape, *captured.stride()))):
            return fake
        sizes, strides = (
            [evaluate(size_of(n), self._symbols) for n in each] for each in (captured.shape, captured.stride())
        )
        if tuple(sizes) != tuple(fake.shape) or tuple(strides) == fake.stride():
            return fake
        with self._mode:
            return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)

    def _is_known(self, number: Any) -> bool:
        size = size_of(number)
        return is_fixed(size) or self._symbols.keys() >= size.free_symbols

    @cached_property
    def _symbols(self) -> dict[sympy.Symbol, int]:
        """The values of the source's symbols in the arguments."""
        placeholders = (node.meta["val"] for node in self._source.nodes if node.op == "placeholder")
        given = zip(placeholders, self._arguments or (), strict=True)
        pairs = [pair for value, argument in given for pair in _numbers(value, argument)]
        return {size: number for size, number in pairs if isinstance(size, sympy.Symbol)}

    def _result(
        self,
        value: Node,
        fake: torch.Tensor,
        is_strided: bool,
        results: dict[tuple[Node, Order | None], int],
        produced: list[Node],
    ) -> OutputSource:
        is_asked = is_strided and fake.numel() and not (fake.is_contiguous() and _is_row_major_in_eager(value))
        order, is_exact = find_result_order(fake) if is_asked else (find_row_major_order(fake), True)
        is_copied = not is_exact or fake.numel() == 0  # torch may resize what is empty, for out=
        torch_layout = (tuple(fake.shape), tuple(fake.stride())) if is_copied else None
        made = value if torch_layout is None else self._once_each(value)
        if (made, order) not in results:
            results[made, order] = len(produced)
            produced.append(made if order is None else self._permute(made, order))
        return OutputSource(
            result=results[made, order],
            order=None if order is None else invert_permutation(order),
            torch_layout=torch_layout,
        )

    def _permute(self, value: Node, order: tuple[int, ...]) -> Node:
        return self._add(aten.permute.default, (value, list(order)), {}, _source(value))

    def _once_each(self, value: Node) -> Node:
        """One element of each dim of stride 0."""
        for dim, (size, stride) in enumerate(zip(value.meta["val"].shape, value.meta["val"].stride(), strict=True)):
            if stride == 0 and size > 1:
                value = self._add(aten.slice.Tensor, (value, dim, 0, 1), {}, _source(value))
        return value


def _numbers(value: Any, argument: Any) -> list[tuple[Size, int]]:
    """The expression of a number, or of each size and stride of a tensor, and its value in an argument."""
    if not isinstance(value, torch.Tensor):
        return [(size_of(value), argument)]
    numbers, theirs = (*value.shape, *value.stride()), (*argument.shape, *argument.stride())
    return [(size_of(number), its) for number, its in zip(numbers, theirs, strict=True)]


def _is_row_major_in_eager(node: Node) -> bool:
    """Whether eager's loop over elements makes a row-major result, as all operands have one shape and count as row-major.

    Torch's fake kernels give it the operands' strides in dims of one element. A number in a tensor's place has no dims, and
    copies keep their operand's strides.
    """
    op = node.target
    if not isinstance(op, OpOverload) or torch.Tag.pointwise not in op.tags:
        return False
    if any(parameter.name == "memory_format" for parameter in parameters(op)):
        return False
    tensors = [
        given for given, parameter in zip(node.args, parameters(op), strict=False) if str(parameter.type) == "Tensor"
    ]
    values = [given.meta["val"] if isinstance(given, Node) else given for given in tensors]
    shape = node.meta["val"].shape
    return bool(values) and all(isinstance(x, torch.Tensor) and x.shape == shape and x.is_contiguous() for x in values)


def _source(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in SOURCE if key in node.meta}


def _kept_meta(node: Node) -> dict[str, Any]:
    """What still holds at other sizes, and the value, which `_add` recomputes where sizes changed."""
    return _source(node) | ({"val": node.meta["val"]} if "val" in node.meta else {})


def _mode_of(graph: Graph) -> FakeTensorMode:
    """The mode that the graph's own values live in: values of two modes cannot meet."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return mode_of(value)
    return FakeTensorMode()


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(v, torch.Tensor) for v in (value if isinstance(value, (tuple, list)) else (value,)))


def _plain(values: Any) -> Any:
    """Arguments of a computation on sizes: a size that was asked of a tensor is read from its fake."""
    return map_arg(values, lambda n: n.meta["val"])
