"""Finds what a mask of attention is made of, for kernels that take no mask as large as the scores.

Models say "causal", "not the padding", "only the own document" by one mask of queries by keys, as transformers does for every
model. In a graph of fixed sizes that mask is an `and` of comparisons: of positions, which are constants here and are computed
to see what they are; of a query's segment with a key's; and of values that each key has alone. Such a call becomes one of
`dynaxla::attention_of_segments`. Any other mask stays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from dynaxla.custom_ops import internal
from dynaxla.fx.graph_utils import is_determined
from dynaxla.ops.splash_attention import takes
from dynaxla.torch_api.fakes import disable_modes

aten = torch.ops.aten

_MOST_ELEMENTS = 1 << 22
"""Of a constant that is computed here."""
_SMALL_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16)
_KEEPS_VALUES = (aten.expand.default, aten.clone.default, aten.alias.default)
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_FORWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: ("query", "key", "value", "dropout_p", "is_causal"),
    internal.ATTENTION: ("query", "key", "value", "mask", "is_causal", "scale"),
}
_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        *("grad", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal"),
    ),
    internal.ATTENTION_BACKWARD: ("grad", "query", "key", "value", "mask", "out", "logsumexp", "is_causal", "scale"),
}
_BEHIND: Mapping[Any, int] = {aten.le.Tensor: 0, aten.lt.Tensor: 1}
"""Comparisons of a key's position with a query's that let a query attend to the keys up to its own place: by how much the
query's position must be larger at the same place."""
_BEFORE: Mapping[Any, int] = {aten.ge.Tensor: 0, aten.gt.Tensor: 1}
"""The same of a query's position with a key's."""


def tell_segments(graph: Graph) -> None:
    """Rewrites the calls of attention in a graph of fixed sizes whose masks are made of segments, where a kernel takes them."""
    known: dict[tuple[Node, int, int], _Reading | None] = {}
    for target, names in (_FORWARD | _BACKWARD).items():
        for node in graph.find_nodes(op="call_function", target=target):
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            mask = given.get("mask", given.get("attn_mask"))
            query, key = (list(given[name].meta["val"].shape) for name in ("query", "key"))
            dtype = str(given["query"].meta["val"].dtype).removeprefix("torch.")
            if given.get("dropout_p") or not takes(query, key, dtype):
                continue
            is_backward = target in _BACKWARD
            if mask is None:
                if not is_backward and not _reads_logsumexp(node):
                    _rewrite(node, given, _Reading(query[2], key[2]), is_backward=False)
                continue
            place = mask, query[2], key[2]
            if place not in known:
                with disable_modes(), torch.no_grad():
                    known[place] = _read(*place)
            found = known[place]
            if found is not None:
                _rewrite(node, given, found, is_backward=is_backward)
    graph.eliminate_dead_code()


def _read(mask: Node, queries: int, keys: int) -> _Reading | None:
    reading = _Reading(queries, keys)
    return reading if reading.read(mask) else None


def _rewrite(node: Node, given: Mapping[str, Any], found: _Reading, *, is_backward: bool) -> None:
    is_causal = found.is_causal or bool(given.get("is_causal", False))
    operands = [given[name] for name in ("query", "key", "value")]
    told = (*operands, found.kept, found.ids)
    if is_backward:
        node.target = internal.ATTENTION_OF_SEGMENTS_BACKWARD
        node.args = (given["grad"], *told, given["out"], given["logsumexp"], is_causal, given.get("scale"))
    else:
        node.target = internal.ATTENTION_OF_SEGMENTS
        node.args = (*told, is_causal, given.get("scale"), _reads_logsumexp(node))
    node.kwargs = {}


def _reads_logsumexp(node: Node) -> bool:
    return any(user.target is not operator.getitem or (user.args[1] == 1 and user.users) for user in node.users)


@dataclass
class _Reading:
    """What a mask was found to be, if `read` gave True.

    Attributes:
        is_causal: whether a query attends to keys up to its own position.
        kept: what must hold for a key, [1 or b, 1, 1, k] or like it.
        ids: none, or two: what must be equal of a query and a key.
    """

    queries: int
    keys: int
    is_causal: bool = False
    kept: list[Node] = field(default_factory=list)
    ids: list[Node] = field(default_factory=list)

    def read(self, mask: Node) -> bool:
        """Whether this is what a mask is: bools, or zeros and minus infinities."""
        while mask.target in _KEEPS_VALUES or (_is_cast(mask) and _is_float(mask.args[0])):
            mask = mask.args[0]  # type: ignore[assignment]
        if mask.meta["val"].dtype is torch.bool:
            return self._read_bools(mask)
        if mask.target is not aten.where.self:
            return False
        holds, kept, other = mask.args
        if _number(other) != -math.inf or not self._read_bools(holds):
            return False
        return _number(kept) == 0 or (isinstance(kept, Node) and _number(kept) is None and self.read(kept))

    def _read_bools(self, node: Any) -> bool:
        while node.target in _KEEPS_VALUES or (_is_cast(node) and node.args[0].meta["val"].dtype is torch.bool):
            node = node.args[0]
        if node.target in _AND:
            return all(map(self._read_bools, node.args))
        value = _evaluate(node)
        if value is not None and bool(value.all()):
            return True
        if (value is not None and self._is_triangle(value)) or self._compares_positions(node):
            self.is_causal = True
            return True
        if node.target is aten.eq.Tensor and self._compares_rows(node):
            return True
        shape = _aligned(node)
        if shape[1:] == [1, 1, self.keys] and node.meta["val"].dtype is torch.bool:
            self.kept.append(node)
            return True
        return False

    def _is_triangle(self, value: torch.Tensor) -> bool:
        causal = torch.ones(self.queries, self.keys, dtype=torch.bool).tril()
        return value.numel() == causal.numel() and torch.equal(value.reshape(causal.shape), causal)

    def _compares_positions(self, node: Node) -> bool:
        """Whether it compares constant positions, and lets a query attend to the keys up to its own place."""
        sides = [side for side in node.args if isinstance(side, Node)] if node.target in (*_BEHIND, *_BEFORE) else []
        if len(sides) != 2 or not self.queries or not self.keys:
            return False
        key, query = sides if node.target in _BEHIND else reversed(sides)
        if _aligned(key)[1:] != [1, 1, self.keys] or _aligned(query)[1:] != [1, self.queries, 1]:
            return False
        places = _evaluate(key), _evaluate(query)
        if places[0] is None or places[1] is None:
            return False
        first = int(places[0].flatten()[0])
        least = first + {**_BEHIND, **_BEFORE}[node.target]
        of_keys, of_queries = places[0].reshape(-1, self.keys), places[1].reshape(-1, self.queries)
        return bool(
            (of_keys == torch.arange(self.keys) + first).all()
            and (of_queries == torch.arange(self.queries) + least).all()
        )

    def _compares_rows(self, node: Node) -> bool:
        """Whether it compares what queries have with what keys have, in numbers that int32 has."""
        if self.ids:
            return False
        places = {tuple(_aligned(side)[1:]): side for side in node.args if isinstance(side, Node)}
        query, key = places.get((1, self.queries, 1)), places.get((1, 1, self.keys))
        if query is None or key is None or len(node.args) != 2:
            return False
        values = [value.flatten() for side in (query, key) if (value := _evaluate(side)) is not None]
        if len(values) == len(places) and len(torch.cat(values).unique()) == 1:
            return True  # all are one segment
        self.ids = [query, key]
        return _is_small(query) and _is_small(key)


def _aligned(node: Node) -> list[int]:
    """The shape of a factor of a mask, with leading ones: [b, heads, queries, keys]."""
    shape = list(node.meta["val"].shape)
    return [1] * (4 - len(shape)) + shape


def _is_cast(node: Node) -> bool:
    return node.target in (aten._to_copy.default, aten.to.dtype)


def _is_float(node: Any) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _number(value: Any) -> float | None:
    """The number that a constant without dims, or an argument, is; None if it is none."""
    if isinstance(value, Node):
        while value.target in (aten.expand.default, aten.full.default, aten.scalar_tensor.default) or _is_cast(value):
            if value.target is not aten.expand.default and not _is_cast(value):
                return _number(value.args[1 if value.target is aten.full.default else 0])
            value = value.args[0]  # type: ignore[assignment]
        return None
    return float(value) if isinstance(value, (int, float)) else None


def _is_small(node: Node) -> bool:
    """Whether its numbers fit int32: by their dtype, or as they count bools."""
    while node.target in (
        *_KEEPS_VALUES,
        aten.index.Tensor,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.view.default,
    ):
        node = node.args[0]  # type: ignore[assignment]
    if node.meta["val"].dtype in _SMALL_INTEGERS:
        return True
    counted = node.args[0] if node.target is aten.cumsum.default else None
    return isinstance(counted, Node) and counted.meta["val"].dtype is torch.bool


def _evaluate(node: Node) -> torch.Tensor | None:
    """The value of a node that no input reaches, computed on the host; None for others, and for large ones."""
    needed, waiting = dict[Node, None](), [node]
    while waiting:
        each = waiting.pop()
        value = each.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() > _MOST_ELEMENTS or not is_determined(each):
            return None
        needed[each] = None
        waiting += [other for other in each.all_input_nodes if other not in needed]
    values: dict[Node, torch.Tensor] = {}
    for each in sorted(needed):
        args, kwargs = map_arg((each.args, each.kwargs), values.__getitem__)
        kwargs = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
        values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]
