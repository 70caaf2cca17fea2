"""The capture of one graph of Dynamo's that torch may have stored: where what is stored cannot be used, it is captured anew."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from dynaxla.aot_cache.cached_graph import CachedGraph
from dynaxla.aot_cache.capture_directory import CaptureDirectory
from dynaxla.errors import DynaxlaError, PackageError
from dynaxla.graph_builder import GraphBuilder
from dynaxla.isolation.forking import new_lock
from dynaxla.passes.manager import CapturedGraph, GraphFunction
from dynaxla.torch_api.capture_cache import (
    Lookup,
    is_packaging,
    make_cacheable_compiler,
    share_in_capture,
    use_cache_tag,
)
from dynaxla.torch_api.capture_state import CaptureState
from dynaxla.torch_api.dynamo import find_undisabled

logger = logging.getLogger("dynaxla")

Convert = Callable[[GraphModule], CapturedGraph]
CaptureBy = Callable[[Callable[[Convert], Any], Sequence[Any]], Callable[..., Any]]
"""Has AOTAutograd capture Dynamo's graph for inputs, by compilers that the first argument makes of conversions, and returns
its function."""


class KeptCapture:
    """Looks up the capture of a graph, or captures it and has torch store it.

    Args:
        capture: captures the graph.
        builder: of the graph.
    """

    def __init__(self, capture: CaptureBy, builder: GraphBuilder) -> None:
        self.builder = builder
        self._capture = capture
        self._state: CaptureState
        self._lookup = Lookup()
        self._loaded: dict[str, CachedGraph] = {}
        self._lock = new_lock()
        self._again: tuple[Callable[..., Any], dict[str, tuple[str, GraphFunction]]] | None = None

    def find(self, tag: str, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function of the graph.

        Args:
            tag: see `dynaxla.aot_cache.capture_key.find_tag`.
            inputs: of the call that is captured; fake tensors alone are kept.
        """
        self._state = CaptureState(inputs)
        with use_cache_tag(tag) as self._lookup, share_in_capture(self):
            function = self._capture(self._make_stored, inputs)
        for why in self._lookup.unreadable:
            self._note(why)
        if is_packaging():
            return function
        if not self._loaded:
            CaptureDirectory().keep_bound(self._lookup.folder)
            return function
        self._lookup.touch()
        return self._recover(function)

    def add_loaded(self, kind: str, graph: CachedGraph) -> None:
        """Adds a graph that was loaded.

        Args:
            kind: "backward", or "forward" for a graph that is not one.
        """
        self._loaded[kind] = graph

    def refuse(self, error: DynaxlaError) -> None:
        """Says that the entry cannot be used; it is removed, and captured anew by torch."""
        self._loaded.clear()
        self._lookup.remove()
        self._note(str(error))

    def recapture_backward(self, error: PackageError) -> GraphFunction:
        """Returns the function of the backward, captured anew.

        Raises:
            PackageError: `error`, if the forward that ran is another one than that which was captured with it.
        """
        graphs = self._recapture(error)[1]
        if "backward" not in graphs or graphs["forward"][0] != self._loaded["forward"].describe():
            raise error
        return graphs["backward"][1]

    def _recover(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that captures the graph anew in the call that shows that the entry cannot be used.

        A graph that is read later is one part, of which nothing ran when it shows.
        """
        current = stored = find_undisabled(function)  # Dynamo disables itself for what is returned here

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            nonlocal current
            if current is stored:  # what was captured anew reads nothing later
                try:
                    return stored(*args)
                except PackageError as error:
                    current = self._recapture(error)[0]
            return current(*args)

        return run

    def _recapture(self, error: PackageError) -> tuple[Callable[..., Any], dict[str, tuple[str, GraphFunction]]]:
        """Returns the function of Dynamo's graph, captured anew, and of each of its graphs the description and the function."""
        with self._lock:
            if self._again is None:
                self._lookup.remove()
                self._note(str(error))
                graphs: dict[str, tuple[str, GraphFunction]] = {}

                def make_compiler(convert: Convert) -> Callable[..., Any]:
                    def build(module: GraphModule, _: object) -> GraphFunction:
                        graph = convert(module)
                        described = str(graph.module.graph)
                        graphs[graph.kind] = described, self.builder.build(graph)
                        return graphs[graph.kind][1]

                    return build

                function = self._state.capture_again(lambda: self._capture(make_compiler, self._state.inputs))
                self._again = function, graphs
            return self._again

    def _make_stored(self, convert: Convert) -> Any:
        return make_cacheable_compiler(CachedGraph, lambda module, _: CachedGraph.built(convert(module), self.builder))

    def _note(self, why: str) -> None:
        line = f"{self.builder.origin.what}: {why}"
        self.builder.shared.recorder.note(captures_discarded=line)
        logger.info("a stored capture was of no use, and made anew: %s", line)
