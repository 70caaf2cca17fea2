"""What AOTAutograd keeps of a graph that this package compiles, and what becomes of it in the process that loads it."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from typing import Any

from dynaxla.building import GraphBuilder, GraphFunction
from dynaxla.captures.recipe import CannotPickle, Recipe, read, written
from dynaxla.captures.rehearsal import rehearse
from dynaxla.captures.sealing import sealed, unsealed
from dynaxla.errors import DynaxlaError, PackageError
from dynaxla.freezing import Gate
from dynaxla.observe.spent import Origin
from dynaxla.options import Options
from dynaxla.passes.graph import CapturedGraph
from dynaxla.process import shared_here
from dynaxla.runtime.bundle import Bundle
from dynaxla.targets.registry import find_target
from dynaxla.torch_api.capture_cache import KeptCode, handed_down, is_packaging

logger = logging.getLogger("dynaxla")


class KeptGraph(KeptCode):
    """A graph's function, and its recipe; in a package its programs too.

    It is read as soon as it is unpickled: an error of that is to torch an entry that it cannot use, and it captures anew; an
    error in `post_compile` would, where Dynamo's captures are kept, be the end of the user's call.
    """

    recipe: Recipe | None  # until it is built of, which changes it
    bundle: Bundle | None

    @classmethod
    def built(cls, graph: CapturedGraph, builder: GraphBuilder) -> KeptGraph:
        """What a compiler gives to AOTAutograd for a graph, which it changes.

        For a package all of its programs are compiled, unless captures alone are asked for.

        Raises:
            PackageError: it is for a package, and cannot be pickled, or its programs cannot be compiled ahead.
        """
        packaged = is_packaging()
        if packaged:  # programs that are made now, and looked up at once where they are loaded
            builder = replace(builder, options=replace(builder.options, compile="now"))
        recipe: bytes | None = None
        try:
            recipe = written(graph, builder.policies, builder.options, builder.origin.what)
        except CannotPickle as error:
            if packaged:
                raise PackageError(f"a graph cannot be saved: {error}") from error
            builder.shared.recorder.note_capture_not_kept(f"{builder.origin.what}: {error}")
        if not packaged or builder.options.captures:
            return cls(None if recipe is None else sealed(pickle.dumps((recipe, None))), builder.build(graph))
        bundle = Bundle()
        inputs = [node.meta["val"] for node in graph.module.graph.find_nodes(op="placeholder")]
        function = replace(builder, bundle=bundle).build(graph)
        rehearse(function, inputs, builder.policies, builder.options.max_executables)
        return cls(sealed(pickle.dumps((recipe, bundle))), function)

    def __getstate__(self) -> bytes | None:
        return self.content

    def __setstate__(self, content: bytes) -> None:
        self.__init__(content, None)  # type: ignore[misc]
        self.recipe, self.bundle = _unpacked(content)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptGraph:
        copy = object.__new__(type(self))  # nothing of it is ever changed
        copy.__dict__.update(self.__dict__, function=None, recipe=None)
        return copy

    def post_compile(self, example_inputs: object, constants: object, graph_kwargs: object) -> None:
        if self.function is None:
            assert self.content is not None
            recipe, self.recipe = self.recipe or _unpacked(self.content)[0], None
            try:
                self.function = _built(recipe, self.bundle)
            except DynaxlaError as error:
                self.function = _raising(error)


def _unpacked(content: bytes) -> tuple[Recipe, Bundle | None]:
    recipe, bundle = pickle.loads(unsealed(content))
    return read(recipe), bundle


def _built(recipe: Recipe, bundle: Bundle | None) -> GraphFunction:
    builder = handed_down()  # by a capture at hand; there is none where Dynamo's captures are kept, or in a package
    builder = _builder_of(recipe) if builder is None else replace(builder, policies=recipe.policies)
    function: GraphFunction = replace(builder, bundle=bundle).build(recipe.captured(builder.shared.registered.current))
    builder.shared.recorder.add(captures_loaded=1)
    return function


def _builder_of(recipe: Recipe) -> GraphBuilder:
    options, shared = Options.from_mapping(recipe.options), shared_here()
    if options.compile == "behind":
        shared.behind.start()
    target = None if options.target is None else find_target(options.target)
    return GraphBuilder(shared, options, recipe.policies, Gate(), Origin(recipe.function), target=target)


def _raising(error: DynaxlaError) -> GraphFunction:
    def fail(args: list[Any]) -> list[Any]:
        raise error.with_traceback(None)

    return fail
