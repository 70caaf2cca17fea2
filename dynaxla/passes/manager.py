"""What passes hand on, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from dynaxla.diagnostics import FallbackReason
from dynaxla.fx.edit import tolerate_strides
from dynaxla.observe.dump import Dump
from dynaxla.observe.graph_script import graph_script
from dynaxla.ops.table import OpTable
from dynaxla.options import Options
from dynaxla.partition.output_views import Aliases
from dynaxla.programs.part_graphs import copied
from dynaxla.targets.registry import target_of
from dynaxla.targets.target import Target
from dynaxla.torch_api.aot import Inputs
from dynaxla.types import Saved


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A functional ATen graph from AOTAutograd on its way to parts.

    Attributes:
        kind: what it is to AOTAutograd: an inference graph has no backward.
        module: the graph; its placeholders are AOTAutograd's inputs in order, then one for each of `seeds` and of `constants`.
        table: what is known of its ops.
        inputs: what AOTAutograd knows of the inputs; None for a backward, and where it is not known.
        static_inputs: indices of the inputs that are weights: parameters and buffers that keep their tensor identity
            between calls and that the graph does not mutate.
        saved: what a forward keeps for the backward alone.
        aliases: the outputs that torch makes, for which the graph gives None; None if there are none.
        constants: tensors that the graph carried as attributes.
        seeds: the devices of its random draws.
        refused: by the names of nodes, why they run in eager, where the op table alone does not say so.
    """

    kind: Literal["inference", "forward", "backward"]
    module: GraphModule
    table: OpTable
    inputs: Inputs | None = None
    static_inputs: frozenset[int] = frozenset()
    saved: Saved = Saved()  # noqa: RUF009 (a frozen value)
    aliases: Aliases | None = None
    constants: tuple[torch.Tensor, ...] = ()
    seeds: tuple[torch.device, ...] = ()
    refused: Mapping[str, FallbackReason] = field(default_factory=dict)

    @property
    def weights(self) -> set[Node]:
        """The placeholders that are weights or constants."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        given = len(placeholders) - len(self.constants)
        return {n for i, n in enumerate(placeholders) if i in self.static_inputs or i >= given}


@dataclass(frozen=True, slots=True)
class Setting:
    """What passes ask beside the graph.

    Attributes:
        named: the target that the options name, or None.
        device: what torch computes the graph on.
        region_numbers: names the operators that are made of control flow.
    """

    named: Target | None
    device: torch.device
    options: Options
    region_numbers: Iterator[int]

    @property
    def target(self) -> Target:
        """What the graph is compiled for.

        Raises:
            TargetError: no target computes on the device.
        """
        return self.named or target_of(self.device)


@dataclass(frozen=True, slots=True)
class Pass:
    """One step on a graph's way; its function's docstring says what it guarantees.

    Attributes:
        run: from a graph to the graph that is handed on; the `module` may be changed in place.
        pays: of which targets it is a gain; None for all. On others it is not run, and nothing behind it may need it.
    """

    run: Callable[[CapturedGraph, Setting], CapturedGraph]
    pays: Callable[[Target], bool] | None = None

    @property
    def name(self) -> str:
        return self.run.__name__


def apply(passes: Sequence[Pass], graph: CapturedGraph, setting: Setting, dump: Dump) -> CapturedGraph:
    """Runs the passes that pay, in order; what each one changed is dumped."""
    for each in passes:
        if each.pays is None or each.pays(setting.target):
            graph = each.run(graph, setting)
            write(dump, each.name, graph)
    return graph


def write(dump: Dump, name: str, graph: CapturedGraph) -> None:
    """Dumps a graph as a script, if passes are dumped and it is another than the last one."""
    if dump.wants("passes"):
        module = GraphModule(graph.module, copied(graph.module.graph))
        tolerate_strides(module.graph)
        dump.write_pass(name, *graph_script(module, graph.constants, graph.seeds))
