"""The passes, in their order: the way of a graph from AOTAutograd to the partition, which cuts it into parts.

Every pass takes a functional graph of ATen ops with `meta["val"]` on every node and gives one; it keeps the values of the
outputs, but for those that `aliases` makes. A part then goes on alone: what its weights determine is split off
(programs/weight_folding.py), and at each set of sizes it is padded (bucketing/padded_graph.py) or specialized
(programs/specialize.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from dynaxla.fx.canonical_ops import rewrite_names
from dynaxla.observe.dump import Dump
from dynaxla.partition.higher_order_ops import take_regions
from dynaxla.passes.batch_norm_folding import fold_batch_norms
from dynaxla.passes.canonicalize import rewrite_convolutions, rewrite_products
from dynaxla.passes.constant_lifting import lift_constants
from dynaxla.passes.grouped_query_attention import share_heads
from dynaxla.passes.host_constants import make_host_constants_on
from dynaxla.passes.in_place_writes import write_in_place
from dynaxla.passes.manager import CapturedGraph, Pass, Setting, apply
from dynaxla.passes.metadata_mutations import keep_views_of_moved_inputs
from dynaxla.passes.output_aliases import split_aliases
from dynaxla.passes.random_seeds import share_seeds, take_seeds
from dynaxla.passes.strided_views import rewrite_strided_views
from dynaxla.programs.donation import mark_donated
from dynaxla.types import DEVICE_TYPE


def in_place(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """Without a backward: writes into parts of large inputs are in-place ops where they can be, with `meta[IN_PLACE]`.

    Of tensors of torch's memory, which PJRT cannot take; see `donated`.
    """
    if graph.kind == "inference" and setting.device.type != DEVICE_TYPE:
        write_in_place(graph.module, graph.inputs)
    return graph


def moved_inputs(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """Views that say how an input lies from now on have `meta[KEPT_VIEW]`."""
    keep_views_of_moved_inputs(graph.module.graph, graph.inputs)
    return graph


def shared_seeds(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """A call draws one seed for a device, and a backward one of its own."""
    share_seeds(graph.module.graph)
    return graph


def aliases(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """No two outputs share memory, and none an input's where sizes vary: `aliases` makes those, and the graph gives None.

    What they are made of is no more `saved`.
    """
    split = split_aliases(graph.module, graph.saved)
    if split is None:
        return graph
    outputs: Any = graph.module.graph.output_node().args[0]
    bases = {outputs[place] for place in split.bases}
    kept = frozenset(place for place in graph.saved.outputs if outputs[place] not in bases)
    return replace(graph, aliases=split, saved=replace(graph.saved, outputs=kept))


def donated(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """Inputs whose memory an executable may take for their new values have `meta[DONATED]`."""
    if graph.inputs is not None and setting.device.type == DEVICE_TYPE:
        bases = set() if graph.aliases is None else set(graph.aliases.bases)
        mark_donated(graph.module, graph.inputs, bases, trains=graph.kind != "inference")
    return graph


def host_constants(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """On the device no tensor that is made of numbers alone is the host's, but where the host asks for it."""
    if setting.device.type == DEVICE_TYPE:
        make_host_constants_on(setting.device, graph.module)
    return graph


def constants(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """No node holds a tensor's data: `constants` are inputs behind all others."""
    return replace(graph, constants=lift_constants(graph.module))


def regions(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """Every higher-order call is an operator of `table`, is put back into the graph, or is `refused`."""
    chained = graph.weights if setting.options.nested_regions == "loop" else set()

    def rewrite(module: GraphModule) -> None:
        inner = CapturedGraph("inference", module, graph.table)
        apply(REWRITES, inner, setting, Dump(None, ()))

    taken = take_regions(graph.module, chained, graph.table, setting.device, setting.region_numbers, rewrite)
    return replace(graph, table=taken.table, refused=taken.left)


def seeds(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """No node draws a seed: `seeds` are inputs, one for each device, in front of the constants."""
    return replace(graph, seeds=tuple(take_seeds(graph.module, len(graph.constants))))


def batch_norms(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """A norm with fixed statistics behind a convolution with fixed weights is part of these; in float32 and float64."""
    if setting.options.fold_parameters:
        fold_batch_norms(graph.module.graph, graph.weights)
    return graph


def strided_views(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """`as_strided` reads the tensor that made the memory, row-major, where that is known."""
    rewrite_strided_views(graph.module.graph)
    return graph


def products(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """A product with a transposed matrix of floats reads the matrix as it lies."""
    rewrite_products(graph.module.graph)
    return graph


def shared_heads(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """Attention reads keys and values before their heads are repeated."""
    share_heads(graph.module.graph)
    return graph


def convolutions(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """A convolution of floats, unless it is a transposed one, has its channels last."""
    rewrite_convolutions(graph.module.graph)
    return graph


def names(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """An op that is another by a name of its own is that other."""
    rewrite_names(graph.module.graph)
    return graph


def live_code(graph: CapturedGraph, setting: Setting) -> CapturedGraph:
    """Every node is needed for an output, or has an effect."""
    graph.module.graph.eliminate_dead_code()
    graph.module.recompile()
    return graph


FOR_ALL = (Pass(in_place), Pass(moved_inputs), Pass(shared_seeds))
"""Whoever runs the graph, eager PyTorch included, runs it so."""

REWRITES = (
    Pass(batch_norms),
    Pass(strided_views),
    Pass(products, pays=lambda target: target.copies_transposed),
    Pass(shared_heads),
    Pass(convolutions, pays=lambda target: target.channels_last),
    Pass(names),
    Pass(live_code),
)
"""Also of the sub-graphs of control flow."""

FOR_PARTS = (Pass(aliases), Pass(donated), Pass(host_constants), Pass(constants), Pass(regions), Pass(seeds), *REWRITES)
"""What is cut into parts has all of these behind it. It is a copy: eager PyTorch runs the graph without them."""

FOR_ONE_CALL = (Pass(constants), Pass(seeds), *REWRITES)
"""A call that runs by itself: its results are tensors of their own, and what it writes is among them."""
