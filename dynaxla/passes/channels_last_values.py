"""Values between convolutions have channels last, too: XLA's CPU compiler would compute them in torch's order of dims, and
transpose what convolutions give and read.

The pass follows images [n, c, h, w] from what convolutions give through elementwise ops, normalizations and sums, and makes of
each op one on [n, h, w, c]. What reads the torch order gets it by a permutation, which XLA drops where two meet.
"""

from __future__ import annotations

import math
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import call_before
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.fakes import mode_of
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten

_LAST, _FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_SAME = (aten.clone.default, aten.detach.default, aten.alias.default)
_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
_NORM = aten._native_batch_norm_legit_functional.default
_WIDE = (torch.float32, torch.float64)


def keep_channels_last(graph: Graph) -> None:
    """Computes images between convolutions with channels last."""
    _Images(graph).follow()


class _Images:
    """Attributes:
    last: by a node [n, c, h, w] the one that has its value [n, h, w, c].
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.last: dict[Node, Node] = {}

    def follow(self) -> None:
        for node in self._graph.nodes:  # those that are put in its place stand in front of it
            if _is_made_by_convolution(node):
                self._begin(node)
            elif node.op != "call_function" or not self.last.keys() & set(node.all_input_nodes):
                continue
            elif node.target in _SAME and _is_image(node):
                self.last[node] = self.last[node.args[0]]  # type: ignore[index]
            elif node.target in _SUMS:
                self._sum(node)
            elif node.target is _NORM:
                self._normalize(node)
            elif node.target is aten.cat.default:
                self._concatenate(node)
            elif _is_elementwise(node) and _is_image(node):
                self._compute(node)

    def _begin(self, node: Node) -> None:
        if node.target is aten.permute.default:
            self.last[node] = node.args[0]  # type: ignore[assignment]
        else:
            before = next(each for each in self._graph.nodes if each.op != "placeholder")
            before = before if node.op == "placeholder" else node.next
            with self._graph.inserting_before(before):
                made = self.last[node] = self._graph.call_function(aten.permute.default, (node, _LAST))
            value = node.meta["val"]
            with mode_of(value):  # another mode may be active
                made.meta = {**node.meta, "val": value.permute(_LAST)}

    def _compute(self, node: Node) -> None:
        if any(isinstance(each, Node) for each in node.kwargs.values()):
            return
        args = map_arg(node.args, lambda each: self._moved(node, each))
        made = self._call(node, node.target, args, node.kwargs)
        self._replace(node, made)

    def _concatenate(self, node: Node) -> None:
        given: Any = node.args
        pieces, dim = given[0], given[1] if len(given) > 1 else 0
        if _is_image(node) and all(map(_is_image, pieces)):
            moved = [self._moved(node, each) for each in pieces]
            self._replace(node, self._call(node, aten.cat.default, (moved, _FIRST[dim % 4])))

    def _sum(self, node: Node) -> None:
        """A sum over dims, of which those that are left are in torch's order with channels last, too."""
        given: Any = node.args
        source, dims, *rest = given
        if source not in self.last or not dims or node.kwargs or len(rest) > 1:
            return
        summed, keeps = {dim % 4 for dim in dims}, bool(rest and rest[0])
        in_order = node.meta["val"].is_contiguous() and (1 in summed or {2, 3} <= summed)
        if not (_is_image(node) if keeps else in_order):
            return
        made = self._call(node, node.target, (self.last[source], sorted(_FIRST[dim] for dim in summed), keeps))
        if keeps:
            self._replace(node, made)
        else:
            node.replace_all_uses_with(made)
            self._graph.erase_node(node)

    def _normalize(self, node: Node) -> None:
        """A batch norm in training, by the formulas of its body (`ops.normalization.batch_norm_functional`)."""
        given: Any = node.args
        x, weight, bias, _, _, training, momentum, eps = given  # the other two are running statistics
        value = x.meta["val"]
        count = value.numel() // value.shape[1]
        if not training or count < 2 or value.dtype not in _WIDE or x not in self.last:
            return
        call, moved = partial(self._compute_of, node), self.last[x]
        mean = call(aten.mean.dim, moved, [0, 1, 2])
        centred = call(aten.sub.Tensor, moved, mean)
        var = call(aten.mean.dim, call(aten.mul.Tensor, centred, centred), [0, 1, 2])
        rstd = call(aten.rsqrt.default, call(aten.add.Tensor, var, eps))
        scale = rstd if weight is None else call(aten.mul.Tensor, rstd, weight)
        shift = call(aten.neg.default, call(aten.mul.Tensor, mean, scale))
        shift = shift if bias is None else call(aten.add.Tensor, shift, bias)
        image = call(aten.add.Tensor, call(aten.mul.Tensor, moved, scale), shift)
        unbiased = call(aten.mul.Tensor, var, count / (count - 1))
        for user in list(node.users):
            place: Any = user.args[1]
            if place == 0:
                self._replace(user, image)
                continue
            made = (mean, rstd, mean, unbiased)[place - 1]
            if place > 2:
                made = self._average(node, made, given[place], momentum)
            user.replace_all_uses_with(made)
            self._graph.erase_node(user)

    def _average(self, before: Node, new: Node, old: Node, momentum: float) -> Node:
        """A running statistic."""
        call = partial(self._compute_of, before)
        return call(aten.add.Tensor, call(aten.mul.Tensor, new, momentum), call(aten.mul.Tensor, old, 1 - momentum))

    def _compute_of(self, before: Node, target: Any, *args: Any) -> Node:
        return self._call(before, target, args)

    def _moved(self, reader: Node, node: Node) -> Node:
        """An operand of an elementwise op with channels last."""
        value = node.meta["val"]
        if node in self.last:
            return self.last[node]
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return node  # a number
        for _ in range(4 - value.dim()):
            node = self._call(reader, aten.unsqueeze.default, (node, 0))
        return self._call(reader, aten.permute.default, (node, _LAST))

    def _replace(self, node: Node, made: Node) -> None:
        """Puts a value with channels last in the place of one of torch's order, with the strides that it has in torch."""
        back = self._call(node, aten.permute.default, (made, _FIRST))
        with self._graph.inserting_before(node):
            kept = self._graph.call_function(aten.clone.default, (back,), {"memory_format": _memory_format(node)})
        kept.meta = dict(node.meta)
        node.replace_all_uses_with(kept)
        self._graph.erase_node(node)
        self.last[kept] = made

    def _call(self, before: Node, target: Any, args: Any, kwargs: Any = None) -> Node:
        """Puts a call in front of a node, whose place in the user's program it has."""
        return call_before(self._graph, before, target, args, kwargs)


def _is_made_by_convolution(node: Node) -> bool:
    """Whether a node is an image that a convolution or its gradient gives, or an input that lies with channels last."""
    if not _is_image(node) or not node.meta["val"].is_floating_point():
        return False
    if node.op == "placeholder":
        return not node.meta["val"].is_contiguous()
    given: Any = node.args
    if node.target is getitem:
        return given[0].target is aten.convolution_backward.default and given[1] == 0
    if node.target is aten.permute.default:
        return given[0].target is internal.CONVOLUTION and list(given[1]) == _FIRST
    return node.target is aten.convolution.default


def _is_elementwise(node: Node) -> bool:
    op = node.target
    return (
        isinstance(op, OpOverload)
        and torch.Tag.pointwise in op.tags
        and torch.Tag.nondeterministic_seeded not in op.tags
    )


def _is_image(node: Node) -> bool:
    """Whether a value has fixed sizes [n, c, h, w] and is row-major, or so with channels last."""
    value = node.meta.get("val")
    if (
        not isinstance(value, torch.Tensor)
        or value.dim() != 4
        or not all(isinstance(size, int) for size in value.shape)
    ):
        return False
    return math.prod(value.shape) > 0 and _memory_format(node) is not None


def _memory_format(node: Node) -> torch.memory_format | None:
    value = node.meta["val"]
    formats = (torch.contiguous_format, torch.channels_last)
    return next((each for each in formats if value.is_contiguous(memory_format=each)), None)


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    if graph.kind != "inference":  # there nothing is saved and no gradient read, and XLA keeps channels last by itself
        keep_channels_last(graph.module.graph)
    return graph


PASS = Pass(
    "channels_last_values",
    _run,
    "in training, elementwise ops, batch norms and sums between convolutions are computed with channels last",
    pays_on=lambda target: target.channels_last,
)
