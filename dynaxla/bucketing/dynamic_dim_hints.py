"""Finds dims that will vary before they do: the lengths of caches that grow with every call.

Dynamo makes a size symbolic when it sees a second value. For a cache that is longer in every call, the graph of the first size
would serve a single call. Such dims are marked before anything is compiled, so that Dynamo captures the graph once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph

from dynaxla.bucketing.size_expressions import Size, is_fixed, size_of
from dynaxla.torch_api.dynamo import mark_maybe_dynamic
from dynaxla.torch_api.fakes import captured_value

Shape = tuple[Size, ...]

LENGTH = 2  # the dim of keys and values that grows: batch, heads, length, channels


def mark_growing_dims(graph: Graph, inputs: Sequence[Any]) -> bool:
    """Marks fixed sizes that will vary for Dynamo. Returns whether it marked a growing one for the first time.

    Args:
        inputs: the values of the graph's inputs.
    """
    for place, dim in find_encoder_dims(graph):
        mark_maybe_dynamic(inputs[place], dim)
    told = [mark_maybe_dynamic(inputs[place], dim) for place, dim in find_growing_dims(graph)]
    return any(told)


def find_growing_dims(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yields (input, dim) of fixed sizes that are lengths of caches which the graph extends.

    A cache is a floating point input of four dims; it grows if a result has its shape but for a larger third dim. Other dims
    vary with it: caches and masks (integers or bools) of the old or the new length, and an encoder's cache whose mask has its
    length.

    Args:
        graph: as Dynamo captured it.
    """
    values = [captured_value(node) for node in graph.find_nodes(op="placeholder")]
    shapes = [_shape(value) for value in values]
    results = [_shape(captured_value(node)) for node in graph.output_node().all_input_nodes]
    caches = [i for i, shape in enumerate(shapes) if len(shape) == 4 and values[i].is_floating_point()]
    grown = {size for i in caches for result in results for size in _grown(shapes[i], result)}
    if not grown:
        return
    masks = [i for i, shape in enumerate(shapes) if len(shape) > 1 and not values[i].is_floating_point()]
    masked = {shapes[i][-1] for i in masks}
    lengths = grown | {shapes[i][LENGTH] for i in caches if shapes[i][LENGTH] in masked}
    places = [*((i, LENGTH) for i in caches), *((i, len(shapes[i]) - 1) for i in masks)]
    for place, dim in places:
        size = shapes[place][dim]
        if size in lengths and is_fixed(size) and size > 1:
            yield place, dim


def find_encoder_dims(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yields (input, dim) of encoder outputs from whose length the graph makes caches.

    Graphs of later calls get these inputs too without reading them; unless their length is symbolic, each length has a graph.
    """
    values = [captured_value(node) for node in graph.find_nodes(op="placeholder")]
    results = [_shape(captured_value(node)) for node in graph.output_node().all_input_nodes]
    lengths = [shape[LENGTH] for shape in results if len(shape) == 4]
    for place, value in enumerate(values):
        shape = _shape(value)
        if len(shape) == 3 and is_fixed(shape[1]) and shape[1] > 1 and lengths.count(shape[1]) > 1:
            yield place, 1


def _grown(cache: Shape, result: Shape) -> Sequence[Size]:
    """The old and the new length if the result is the cache extended; else nothing."""
    if len(result) != 4 or any(cache[dim] != result[dim] for dim in range(4) if dim != LENGTH):
        return ()
    more = size_of(result[LENGTH] - cache[LENGTH])  # a plain number, also of a symbol and the same one and a token
    return (cache[LENGTH], result[LENGTH]) if is_fixed(more) and more > 0 else ()


def _shape(value: object) -> Shape:
    return tuple(map(size_of, value.shape)) if isinstance(value, torch.Tensor) else ()
