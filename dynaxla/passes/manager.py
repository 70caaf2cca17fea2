"""What a pass is, what it takes and gives, and how passes are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from dynaxla.diagnostics import FallbackReason
from dynaxla.fx.edit import tolerate_strides
from dynaxla.fx.graph_utils import copy_graph, opaque_class_of, tensors_of
from dynaxla.observe.dump import Dump
from dynaxla.observe.graph_script import graph_script
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.table import OpTable
from dynaxla.options import Options
from dynaxla.partition.opaque_values import OpaqueValues
from dynaxla.partition.output_views import Aliases
from dynaxla.targets.registry import target_of_device
from dynaxla.targets.target import Target
from dynaxla.torch_api import symbols
from dynaxla.torch_api.aot import GraphInputs
from dynaxla.types import Saved

GraphFunction = Callable[[list[Any]], list[Any]]
"""The function of a captured graph: it takes one list, which it may empty."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A functional ATen graph from AOTAutograd on its way to parts.

    Attributes:
        kind: what it is to AOTAutograd: an inference graph has no backward.
        module: the graph; its placeholders are AOTAutograd's inputs in order, but for those of `opaque`, then one for each of
            `seeds` and of `constants`.
        table: what is known of its ops.
        inputs: what AOTAutograd knows of the inputs; None for a backward, and where it is not known.
        static_inputs: indices of the inputs that are weights: parameters and buffers that keep their tensor identity
            between calls and that the graph does not mutate.
        saved: what a forward keeps for the backward alone.
        gradients: indices of a backward's inputs that are gradients of the forward's results.
        aliases: the outputs that torch makes, for which the graph gives None; None if there are none.
        constants: tensors that the graph carried as attributes.
        seeds: the devices of its random draws.
        opaque: the inputs and outputs that are objects, which no part takes or gives.
        refused: by the names of nodes, why they run in eager, where the op table alone does not say so.
    """

    kind: Literal["inference", "forward", "backward"]
    module: GraphModule
    table: OpTable
    inputs: GraphInputs | None = None
    static_inputs: frozenset[int] = frozenset()
    saved: Saved = Saved()  # noqa: RUF009 (a frozen value)
    gradients: tuple[int, ...] = ()
    aliases: Aliases | None = None
    constants: tuple[torch.Tensor, ...] = ()
    seeds: tuple[torch.device, ...] = ()
    opaque: OpaqueValues = OpaqueValues()  # noqa: RUF009 (a frozen value)
    refused: Mapping[str, FallbackReason] = field(default_factory=dict)

    @property
    def weights(self) -> set[Node]:
        """The placeholders that are weights or constants."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        given = len(placeholders) - len(self.constants)
        return {n for i, n in enumerate(placeholders) if i in self.static_inputs or i >= given}


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may read beside the graph.

    Attributes:
        named: the target that the options name, or None.
        device: the device on which torch computes the graph.
        options: the user's.
        region_numbers: numbers for the names of operators made of higher-order calls.
        recorder: counts the seconds of the passes.
    """

    named: Target | None
    device: torch.device
    options: Options
    region_numbers: Iterator[int]
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def target(self) -> Target:
        """The target that the graph is compiled for.

        Raises:
            TargetError: no target computes on the device.
        """
        return self.named or target_of_device(self.device)


@dataclass(frozen=True, slots=True)
class Pass:
    """The record of a pass, which stands in its module as `PASS`.

    Attributes:
        name: of its module; dumps and docs/architecture.md show it.
        run: takes a graph and returns the graph that is handed on; it may change the `module` in place.
        guarantees: what holds of the graph afterwards, as docs/architecture.md says it.
        pays_on: the targets on which it is a gain; None for all. It is not run on others, and no later pass may need it.
    """

    name: str
    run: Callable[[CapturedGraph, PassContext], CapturedGraph]
    guarantees: str
    pays_on: Callable[[Target], bool] | None = None


def run_passes(passes: Sequence[Pass], graph: CapturedGraph, context: PassContext, dump: Dump) -> CapturedGraph:
    """Runs the passes that pay on the target, in order, and dumps the graphs that they changed."""
    started = time.perf_counter()
    for each in passes:
        if each.pays_on is None or each.pays_on(context.target):
            graph = each.run(graph, context)
            write_graph(dump, each.name, graph)
    context.recorder.add(passes_s=time.perf_counter() - started)
    return graph


def write_graph(dump: Dump, name: str, graph: CapturedGraph) -> None:
    """Dumps a graph as a script, if passes are dumped and the graph differs from the last one dumped."""
    if dump.wants("passes"):
        module = GraphModule(graph.module, copy_graph(graph.module.graph))
        tolerate_strides(module.graph)
        dump.write_pass(name, *graph_script(module, graph.constants, graph.seeds))


def find_static_inputs(inputs: GraphInputs | None, module: GraphModule) -> frozenset[int]:
    """Inputs that are parameters or buffers and that the graph does not write to.

    To Dynamo a module's plain tensor is one too. Where it has other sizes in other modules, they are symbols: that is an
    input like any other. To AOTAutograd the mesh of a parameter that is a DTensor is one.
    """
    if inputs is None:
        return frozenset()
    placeholders = module.graph.find_nodes(op="placeholder")
    others = {
        i for i, node in enumerate(placeholders) if any(map(symbols.varies, tensors_of(node))) or opaque_class_of(node)
    }
    return inputs.static - {write.input for write in inputs.writes} - others
