"""`as_strided` as a read of the memory behind a tensor, where that memory is known."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.types import IntLikeType

from dynaxla.custom_ops import internal
from dynaxla.fx.edit import call_before, insert_before, memory_of, replace
from dynaxla.fx.permutations import find_row_major_order
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.symbols import expression, varies
from dynaxla.types import KEPT_VIEW

aten = torch.ops.aten
Number = int | Node

_READS = (aten.as_strided.default, aten.as_strided_copy.default)


def rewrite_strided_views(graph: Graph) -> None:
    """Reads what `as_strided` reads from the tensor that made the memory, permuted unless it is row-major.

    Where it cannot be read so, the call stays, but takes the tensor that made the memory instead of a view of it: a view
    that a compiled part gives has eager's values, but not the memory between them, which eager's `as_strided` may read.
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        _scatter_into_owner(graph, node)
    # The last first, so that each still sees those before it as views.
    for node in reversed(list(graph.nodes)):
        if node.target in _READS and KEPT_VIEW not in node.meta:
            _rewrite(graph, node)


def _scatter_into_owner(graph: Graph, node: Node) -> None:
    """Writes into a copy of the memory behind a view and reads the view there again."""
    view, source, size, stride, offset = _arguments(node, "self", "src", "size", "stride", "storage_offset")
    owner = _owner(view)
    if owner is view or not _alike(owner, view) or (owner.op == "placeholder" and not _is_dense(owner.meta["val"])):
        return
    place: Number | None = _start_in(owner, view)
    if offset is None and place is not None and _is_dense(owner.meta["val"]):
        owner = call_before(graph, node, aten.clone.default, (owner,))  # whose storage begins with its first element
    else:
        place = _read(graph, node, view, view.meta["val"].storage_offset(), aten.sym_storage_offset.default)
    written = call_before(
        graph, node, aten.as_strided_scatter.default, (owner, source, size, stride, place if offset is None else offset)
    )
    replace(graph, node, aten.as_strided.default, (written, *_layout(graph, node, view), place))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a copy of a tensor has its strides. Of symbolic strides only row-major ones are known."""
    return value.is_contiguous() or (not varies(value) and find_row_major_order(value) is not None)


def _layout(graph: Graph, node: Node, view: Node) -> tuple[list[Number], list[Number]]:
    """Sizes and strides of a view, as numbers or as nodes in front of `node`."""
    value = view.meta["val"]
    sizes = [_read(graph, node, view, size, aten.sym_size.int, dim) for dim, size in enumerate(value.shape)]
    strides = [_read(graph, node, view, step, aten.sym_stride.int, dim) for dim, step in enumerate(value.stride())]
    return sizes, strides


def _read(graph: Graph, node: Node, tensor: Node, value: IntLikeType, target: OpOverload, *dim: int) -> Number:
    """A number of a tensor's layout: itself, or where it varies a node in front of `node`."""
    return value if type(value) is int else insert_before(node, target, (tensor, *dim), {}, value)


def _start_in(owner: Node, view: Node) -> int | None:
    """Where a view begins, counted in elements from the first of the tensor that made its memory; None if that varies.

    It is the same in every call. Where an input begins in its storage is not, and nothing guards on it.
    """
    begins = view.meta["val"].storage_offset() - owner.meta["val"].storage_offset()
    return int(begins) if type(begins) is int or expression(begins).is_Integer else None


def _rewrite(graph: Graph, node: Node) -> None:
    view, size, stride, offset = _arguments(node, "self", "size", "stride", "storage_offset")
    source = _as_elements_of(graph, node, view, _owner(view))
    start = offset if offset is not None or not _alike(source, view) else _start_in(source, view)
    if start is not None and _gather(graph, node, source, (size, stride, start), is_relative=offset is None):
        return
    if offset is None and source is not view:
        offset = _place(graph, node, source, view)
    node.args, node.kwargs = (source, size, stride, offset), {}


def _gather(graph: Graph, node: Node, source: Node, layout: tuple[Any, Any, Any], *, is_relative: bool) -> bool:
    """Reads elements of a tensor by their numbers in it, where they are its own; whether it did.

    Args:
        layout: sizes, strides and the number of the first element.
        is_relative: whether that counts from the tensor's first element, not from its storage's.
    """
    value, (size, stride, start) = source.meta["val"], layout
    plain = all(type(n) is int for n in (*value.shape, *value.stride(), *size, *stride, start))
    if not is_relative and value.storage_offset() != 0:
        return False
    if plain and (start < 0 or not _reaches(value, size, stride, start)):
        return False
    order = find_row_major_order(value) if plain else None  # asked of symbols, it would add a guard
    if order is not None:
        source = call_before(graph, node, aten.permute.default, (source, list(order)))
    elif not value.is_contiguous():
        return False
    replace(graph, node, internal.GATHER_STRIDED, (source, size, stride, start))
    return True


def _place(graph: Graph, node: Node, source: Node, view: Node) -> Number:
    """Where a view begins in the storage of the tensor that made its memory."""
    place, start = view.meta["val"].storage_offset(), _start_in(source, view)
    if _owner(source).op != "placeholder" or start is None:
        return _read(graph, node, view, place, aten.sym_storage_offset.default)
    begins = insert_before(node, aten.sym_storage_offset.default, (source,), {}, source.meta["val"].storage_offset())
    return insert_before(node, operator.add, (begins, start), {}, place)


def _arguments(node: Node, *names: str) -> tuple[Any, ...]:
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return tuple(given.get(name) for name in names)


def _as_elements_of(graph: Graph, node: Node, view: Node, owner: Node) -> Node:
    """The owner of a view's memory with elements as the view has: of its dtype, conjugated or negated as the view is."""
    wanted, found = view.meta["val"], owner.meta["val"]
    if found.dtype is not wanted.dtype:
        if not found.is_contiguous():
            return view
        flat = call_before(graph, node, aten.view.default, (owner, [-1]))
        owner = call_before(graph, node, aten.view.dtype, (flat, wanted.dtype))
    if found.is_conj() != wanted.is_conj():
        owner = call_before(graph, node, aten._conj.default, (owner,))
    if found.is_neg() != wanted.is_neg():
        owner = call_before(graph, node, aten._neg_view.default, (owner,))
    return owner


def _alike(owner: Node, view: Node) -> bool:
    """Whether two tensors that share memory read its elements alike: of one dtype, conjugated and negated or not."""
    one, other = owner.meta["val"], view.meta["val"]
    return (one.dtype, one.is_conj(), one.is_neg()) == (other.dtype, other.is_conj(), other.is_neg())


def _owner(node: Node) -> Node:
    """The node that made the memory which `node` is a view of, as torch's fake tensors share it."""
    while True:
        call = node.args[0] if node.target is operator.getitem else node  # such as a split, which gives several views
        shared = [source for source in call.all_input_nodes if _share_memory(source, node)]  # type: ignore[union-attr]
        if not shared:
            return node
        node = shared[0]


def _share_memory(source: Node, node: Node) -> bool:
    return isinstance(source.meta.get("val"), torch.Tensor) and memory_of(source) == memory_of(node)


def _reaches(value: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> bool:
    """Whether a tensor's own elements, and not only its storage, hold all that a strided view reads."""
    return 0 in size or offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) < value.numel()


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    rewrite_strided_views(graph.module.graph)
    return graph


PASS = Pass(
    "strided_views", _run, "`as_strided` reads the tensor that made the memory, row-major, where that tensor is known"
)
