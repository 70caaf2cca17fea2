"""Attention whose keys and values are repeats of fewer heads reads these: the repeats are never written.

Models with grouped heads may repeat keys and values, by `expand` and `reshape`, before they attend (transformers does where
there is a mask): a step of a decoder would write its whole cache as often as heads share it, at every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dynaxla.custom_ops import internal
from dynaxla.passes.manager import CapturedGraph, Pass, PassContext
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.symbols import expression

aten = torch.ops.aten

_ATTENTIONS: tuple[OpOverload, ...] = (aten._scaled_dot_product_flash_attention_for_cpu.default, internal.ATTENTION)
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_REPEATED = 2
"""The dim of the repeats, behind the heads: [batch, heads, repeats, length, size of a head]."""


def share_heads(graph: Graph) -> None:
    """Gives attention the keys and values whose heads were repeated, where both were."""
    for target in _ATTENTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            query, key, value, *others = node.args
            shared_key, shared_value = _before_repeats(key), _before_repeats(value)
            if shared_key is None or shared_value is None:
                continue
            if shared_key.meta["val"].shape[1] == shared_value.meta["val"].shape[1]:
                node.args = (query, shared_key, shared_value, *others)


def _before_repeats(node: Any) -> Node | None:
    """What has fewer heads, each of which stands several times in a row in the node's value; None if nothing does."""
    expand = _past_clones(node.args[0]) if node.target in _RESHAPES else None
    if expand is None or expand.target is not aten.expand.default:
        return None
    row: Any = expand.args[0]
    if row.target is not aten.unsqueeze.default or row.args[1] % row.meta["val"].dim() != _REPEATED:
        return None
    source: Node = row.args[0]
    wide, whole = _shape(expand), _shape(node)
    if len(wide) != len(whole) + 1 or not all(isinstance(size, int) for size in wide[1 : _REPEATED + 1]):
        return None
    batch, heads, repeats, *rest = wide
    is_repeat = _shape(source) == [batch, heads, *rest] and whole == [batch, heads * repeats, *rest]
    return source if is_repeat and len(whole) == 4 else None


def _past_clones(node: Any) -> Node:
    while node.target is aten.clone.default:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _shape(node: Node) -> list[Any]:
    return [expression(size) for size in node.meta["val"].shape]


def _run(graph: CapturedGraph, context: PassContext) -> CapturedGraph:
    share_heads(graph.module.graph)
    return graph


PASS = Pass(
    "grouped_query_attention",
    _run,
    "attention reads keys and values before their heads are repeated: a step of a decoder does not write its cache again",
)
