"""Where a compiled graph goes wrong: the first op from which on results are not eager's, and the pass that made it so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.fx import Graph, Node

from dynaxla.diagnostics import user_frame
from dynaxla.lowering.bisect import cut_after, find_first_failing
from dynaxla.observe.differences import Difference
from dynaxla.observe.repro import write_comparison_repro
from dynaxla.passes.manager import CapturedGraph, PassContext
from dynaxla.passes.pass_order import FOR_ALL, FOR_PARTS
from dynaxla.torch_api.modules import graph_module
from dynaxla.types import Saved
from dynaxla.verify.eager_graph import (
    EagerGraph,
    copy_arguments,
    copy_captured,
    is_on_device,
    move_to_host,
    repeat_draws,
)

logger = logging.getLogger("dynaxla")

LOWERING = "lowering or XLA"
"""What made a difference that no pass made."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A call of a compiled graph whose results are not eager's.

    Attributes:
        call: the user's function, the kind of graph, and the number of the call.
        result: position of the first result that differs, among those of AOTAutograd's graph.
        difference: how far that result is from eager's.
        op: the first op from which on values differ; None if it could not be singled out.
        frame: the user's source line of the op, or of the result.
        made_by: the name of the pass after which eager, too, gives other results, or `LOWERING`.
        repro: path of a script that shows the difference, or None.
    """

    call: str
    result: int
    difference: Difference
    op: str | None
    frame: str | None
    made_by: str
    repro: str | None

    def __str__(self) -> str:
        parts = [f"{self.call}: result {self.result} is not eager's: {self.difference}"]
        parts += [f"the first op that diverges: {self.op or 'none alone'}{f' at {self.frame}' if self.frame else ''}"]
        parts += [f"made so by: {self.made_by}"]
        parts += [f"repro: {self.repro}"] if self.repro else []
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class DivergenceFinder:
    """Says where the results of one graph go wrong.

    Attributes:
        graph: as captured; no pass changes it.
        context: that of the passes.
        build: builds the function of a graph, for trial calls.
    """

    graph: CapturedGraph
    context: PassContext
    build: Callable[[CapturedGraph], Callable[[list[Any]], list[Any]]]

    def explain(self, call: str, differences: Mapping[int, Difference], given: Sequence[Any]) -> Divergence:
        """Finds what made the results of a call differ. It compiles beginnings of the graph, and warns if that fails.

        Args:
            call: the call, for the user.
            differences: of its results, by position.
            given: copies of its arguments.
        """
        result, difference = next(iter(differences.items()))
        found = Divergence(call, result, difference, None, None, LOWERING, None)
        try:
            node = find_first_failing(self.graph.module.graph, partial(self._agrees, given), is_own=_computes)
            made_by = self._find_pass(given)
            source = node or self._source_of(result)
            frame = None if source is None else user_frame(source)
            op = None if node is None else str(node.target)
            found = replace(found, op=op, frame=frame, made_by=made_by or LOWERING)
            return replace(found, repro=self._write_repro(found, node, given))
        except Exception:  # a boundary: the difference is told, whatever the search for its cause runs into
            logger.warning("why results differ could not be found out", exc_info=True)
            return found

    def _agrees(self, given: Sequence[Any], beginning: Graph) -> bool:
        """Whether the compiled beginning of the graph gives eager's values."""
        graph = self._cut(beginning)
        eager = EagerGraph(graph)
        expected = eager.run(copy_arguments(given))
        with repeat_draws(self.context.device):
            actual = self.build(copy_captured(graph))(copy_arguments(given))
        return not eager.find_differences(actual, expected, given)

    def _cut(self, beginning: Graph) -> CapturedGraph:
        module = graph_module(self.graph.module, beginning)
        saved = Saved(inputs=self.graph.saved.inputs)
        return replace(self.graph, module=module, inputs=None, saved=saved)

    def _find_pass(self, given: Sequence[Any]) -> str | None:
        """The first pass after which the graph, in eager, gives other results than before all passes."""
        eager = EagerGraph(self.graph)
        expected = eager.run(copy_arguments(given))
        graph, text = copy_captured(self.graph), ""
        for each in (*FOR_ALL, *FOR_PARTS):
            if each.pays_on is not None and not each.pays_on(self.context.target):
                continue
            graph = each.run(graph, self.context)
            before, text = text, f"{graph.module.graph.python_code('self').src} {len(graph.constants)}"
            if text == before:
                continue
            results = EagerGraph(copy_captured(graph)).run(copy_arguments(given))
            if eager.find_differences(results, expected, given):
                return each.name
        return None

    def _source_of(self, result: int) -> Node | None:
        """The node that a result is."""
        results = self.graph.module.graph.output_node().args[0]
        node = results[result] if isinstance(results, (tuple, list)) and result < len(results) else results
        return node if isinstance(node, Node) else None

    def _write_repro(self, found: Divergence, node: Node | None, given: Sequence[Any]) -> str:
        beginning = self.graph.module.graph if node is None else cut_after(self.graph.module.graph, node)
        module = self._cut(beginning).module
        on_host = move_to_host(module) if is_on_device(module) else module
        inputs = [x.detach().cpu() if hasattr(x, "detach") else x for x in given]
        return str(write_comparison_repro(on_host, inputs, str(found)))


def _computes(node: Node) -> bool:
    return node.op == "call_function"
