"""`as_strided` as a read of the memory behind a tensor, where that memory is known."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.capture.editing import call_before, replace
from dynaxla.capture.specialize import row_major_order
from dynaxla.ops import internal
from dynaxla.stages import KEPT_VIEW

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.alias.default, aten.as_strided.default, aten.detach.default, aten.diagonal.default, aten.expand.default,
        aten.permute.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default, aten.transpose.int,
        aten.unbind.int, aten.unfold.default, aten.unsqueeze.default, aten.view.default,
    }
)  # fmt: skip


def rewrite_strided_views(graph: Graph) -> None:
    """Reads what `as_strided` reads from the tensor that made the memory, permuted unless it is row-major.

    Where that memory is not known, at least the views before it go: what a compiled part gives has eager's values, but
    not its gaps, and eager's `as_strided` would read others.
    """
    # The last first, so that each still sees those before it as views.
    for node in reversed(graph.find_nodes(op="call_function", target=aten.as_strided.default)):
        if KEPT_VIEW not in node.meta:
            _rewrite(graph, node)


def _rewrite(graph: Graph, node: Node) -> None:
    given = dict(zip(("self", "size", "stride", "storage_offset"), node.args, strict=False)) | node.kwargs
    view, size, stride, offset = given["self"], given["size"], given["stride"], given.get("storage_offset")
    if offset is None:
        offset = view.meta["val"].storage_offset()  # type: ignore[union-attr]
    source = _owner(view)  # type: ignore[arg-type]
    value = source.meta["val"]
    node.args, node.kwargs = (source, size, stride, offset), {}
    numbers = (*value.shape, *value.stride(), *size, *stride, offset)  # type: ignore[misc]
    plain = all(type(n) is int for n in numbers)
    if value.storage_offset() != 0 or (plain and not _reaches(value, size, stride, offset)):
        return
    order = row_major_order(value) if plain else None  # a question about symbols would become a guard
    if order is not None:
        source = call_before(graph, node, aten.permute.default, (source, list(order)))
    elif not value.is_contiguous():
        return
    replace(graph, node, internal.GATHER_STRIDED, (source, size, stride, offset))


def _owner(node: Node) -> Node:
    """The node that made the memory which `node` is a view of."""
    while True:
        view = node.args[0] if node.target is operator.getitem else node
        if not isinstance(view, Node) or view.target not in _VIEWS:
            return node
        node = view.args[0]  # type: ignore[assignment]


def _reaches(value: torch.Tensor, size: Any, stride: Any, offset: Any) -> bool:
    """Whether a tensor's own elements, and not only its storage, hold all that a strided view reads."""
    return 0 in size or offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) < value.numel()
