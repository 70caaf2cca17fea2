"""What AOTAutograd keeps of a graph that this package compiles, and what becomes of it in the process that loads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dynaxla.aot_cache.bucket_calls import call_at_declared_buckets
from dynaxla.aot_cache.capture_directory import CaptureDirectory
from dynaxla.aot_cache.serialized_graph import (
    CannotPickle,
    SerializedGraph,
    SerializedWarmStart,
    deserialize_graph,
    deserialize_warm_start,
    serialize_graph,
    serialize_warm_start,
)
from dynaxla.cache.key import Key
from dynaxla.cache.package import Archive
from dynaxla.errors import DynaxlaError, PackageError, make_raising
from dynaxla.graph_builder import GraphBuilder
from dynaxla.observe.compile_timing import CapturedFunction
from dynaxla.options import Options
from dynaxla.partition.partitioner import WarmStart
from dynaxla.passes.manager import CapturedGraph, GraphFunction
from dynaxla.programs.miss_policy import FunctionPolicy
from dynaxla.runtime.packaged_programs import PackagedPrograms
from dynaxla.runtime_state import shared_here
from dynaxla.targets.registry import find_target
from dynaxla.torch_api.capture_cache import CachedCode, NotUsable, get_shared, is_packaging
from dynaxla.torch_api.capture_state import find_fixed_floats, guard_floats, is_guarded_by_memory
from dynaxla.torch_api.patches import apply_patches

logger = logging.getLogger("dynaxla")

_RECIPE, _WARM_START = "graph", "warm_start"
_GRAPH = Key.of(graph="the only one")
"""Of the graph's entries in its package: torch has the key by which it is found."""


class CachedGraph(CachedCode):
    """A graph's function, its recipe, and a warm_start of it where there can be one; in a package its programs too.

    What is kept is read as soon as it is unpickled: an error of that is to torch an entry that it cannot use, and it captures
    anew, as it does for an error in `post_compile`, which would be the end of the user's call where Dynamo's captures are kept:
    there is no capture then, and the graph raises. A recipe with a warm_start that holds here is read when a call's program is
    not on disk.

    Attributes:
        fixed_floats: the names of the floats of which the graph has constants: where it is found, Dynamo is to guard on them.
    """

    recipe: SerializedGraph | None  # until it is built of, which changes it
    bundle: PackagedPrograms | None
    stored: SerializedWarmStart | None = None
    fixed_floats: Sequence[str] = ()

    @classmethod
    def built(cls, graph: CapturedGraph, builder: GraphBuilder) -> CachedGraph:
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
            if is_guarded_by_memory() and not packaged:
                raise CannotPickle(
                    "torch guards on how its inputs share memory, of which a stored capture says nothing"
                )
            recipe = serialize_graph(graph, builder.policies, builder.options, builder.origin.what)
        except CannotPickle as error:
            if packaged:
                raise PackageError(f"a graph cannot be saved: {error}") from error
            builder.shared.recorder.note(captures_not_kept=f"{builder.origin.what}: {error}")
        if not packaged or builder.options.package == "captures":
            function, warm_start = builder.build_with_warm_start(graph, warm_starts=recipe is not None)
            content = None if recipe is None else _content(recipe, None, warm_start, builder)
            builder.shared.recorder.count_cache("capture", misses=1, written_bytes=len(content or b""))
            return cls(content, function)
        bundle = PackagedPrograms()
        inputs = [node.meta["val"] for node in graph.module.graph.find_nodes(op="placeholder")]
        plain = replace(builder.options, verify=0.0, call_metrics=False)  # its calls here are on zeros
        function, warm_start = replace(builder, bundle=bundle, options=plain).build_with_warm_start(graph)
        call_at_declared_buckets(function, inputs, builder.policies, builder.options.max_executables)
        assert recipe is not None
        return cls(_content(recipe, bundle, warm_start, builder), function)

    def prepare_for_serialization(self) -> None:
        super().prepare_for_serialization()
        if self.content is not None and not is_packaging():
            CaptureDirectory().count(self.content)

    def describe(self) -> str:
        """The text of the graph as AOTAutograd handed it over.

        Raises:
            PackageError: it cannot be read.
        """
        assert self.content is not None
        return str(_recipe(self.content).module.graph)

    def __getstate__(self) -> bytes | None:
        return self.content

    def __setstate__(self, content: bytes) -> None:
        apply_patches()  # nothing asked for the backend where a package is loaded
        self.__init__(content, None)  # type: ignore[misc]
        recipe, self.bundle, stored, self.fixed_floats = unpack_content(content)
        self.stored = None if stored is None else deserialize_warm_start(stored)
        if self.stored is not None and not _holds(self.stored):
            self.stored = None
        self.recipe = deserialize_graph(recipe) if self.stored is None else None

    def __copy__(self) -> CachedGraph:  # torch stores a copy: what is stored was just written, and is not read for that
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedGraph:
        copy = object.__new__(type(self))  # nothing of it is ever changed
        copy.__dict__.update(self.__dict__, function=None, recipe=None)
        return copy

    def post_compile(self, example_inputs: object, constants: object, graph_kwargs: Any) -> None:
        if self.function is None:
            assert self.content is not None
            capture = get_shared()
            try:
                guard_floats(self.fixed_floats)
                self.function = self._build()
            except DynaxlaError as error:
                if capture is not None:
                    capture.refuse(error)
                    raise NotUsable from error
                self.function = make_raising(error)
            else:
                if capture is not None:
                    is_backward = graph_kwargs["is_backward"]
                    capture.add_loaded("backward" if is_backward else "forward", self)
                    if is_backward:
                        self.function = self._recover(self.function, capture.recapture_backward)

    def _recover(self, function: GraphFunction, recapture: Callable[[PackageError], GraphFunction]) -> GraphFunction:
        """Makes the function of a backward that is captured anew in the call that shows that what is stored cannot be used."""

        def run(inputs: list[Any]) -> Any:
            try:
                return function(inputs)
            except PackageError as error:
                self.function = recapture(error)
            return self.function(inputs)

        return run

    def _build(self) -> GraphFunction:
        assert self.content is not None
        recipe, self.recipe = self.recipe, None
        if recipe is None and self.stored is not None:
            function = _build_from(self.stored, self.content, self.bundle)
        else:
            function = _built(recipe or _recipe(self.content), self.bundle)
        if self.bundle is None:
            shared_here().recorder.count_cache("capture", hits=1, read_bytes=len(self.content))
        return function


def pack_content(
    recipe: bytes, bundle: PackagedPrograms | None, stored: bytes | None, fixed_floats: Sequence[str] = ()
) -> bytes:
    """A package of what is stored of a graph; its programs among it, where there is a bundle."""
    archive = Archive() if bundle is None else bundle.entries.copy()
    archive.put(_RECIPE, _GRAPH, recipe)
    if stored is not None:
        archive.put(_WARM_START, _GRAPH, stored)
    document = {} if bundle is None else bundle.document()
    return archive.pack({**document, "fixed_floats": list(fixed_floats)})


def unpack_content(content: bytes) -> tuple[bytes, PackagedPrograms | None, bytes | None, list[str]]:
    """What `pack_content` was given.

    Raises:
        PackageError: the content is damaged, or other versions wrote it.
    """
    document, archive = Archive.unpack(content)
    recipe, stored = archive.get(_RECIPE, _GRAPH), archive.get(_WARM_START, _GRAPH)
    if recipe is None:
        raise PackageError("what was saved is not used: it has no graph", "save it anew")
    bundle = PackagedPrograms.from_document(document, archive) if "environment" in document else None
    return recipe, bundle, stored, document["fixed_floats"]


def _content(
    recipe: bytes, bundle: PackagedPrograms | None, warm_start: WarmStart | None, builder: GraphBuilder
) -> bytes:
    terms = builder.policies, builder.options, builder.origin.what
    stored = None if warm_start is None else serialize_warm_start(warm_start, *terms)
    return pack_content(recipe, bundle, stored, find_fixed_floats())


def _recipe(content: bytes) -> SerializedGraph:
    return deserialize_graph(unpack_content(content)[0])


def _holds(stored: SerializedWarmStart) -> bool:
    """Whether the passes would give here what the warm_start says."""
    try:
        return _builder(stored).circumstances(stored.warm_start.device) == stored.warm_start.circumstances
    except DynaxlaError:  # of the options or the target: that of the recipe, which is the call's
        return False


def _build_from(stored: SerializedWarmStart, content: bytes, bundle: PackagedPrograms | None) -> GraphFunction:
    builder = replace(_builder(stored), bundle=bundle)
    table = builder.shared.registered.current
    function = builder.build_from_warm_start(stored.warm_start, lambda: _recipe(content).rebuild(table))
    builder.shared.recorder.add(captures_loaded=1)
    return function


def _built(recipe: SerializedGraph, bundle: PackagedPrograms | None) -> GraphFunction:
    builder = replace(_builder(recipe), bundle=bundle)
    function = builder.build(recipe.rebuild(builder.shared.registered.current))
    builder.shared.recorder.add(captures_loaded=1)
    return function


def _builder(kept: SerializedGraph | SerializedWarmStart) -> GraphBuilder:
    """That of the capture at hand; there is none where Dynamo's captures are kept, or in a package."""
    capture = get_shared()
    return _builder_of(kept) if capture is None else replace(capture.builder, policies=kept.policies)


def _builder_of(recipe: SerializedGraph | SerializedWarmStart) -> GraphBuilder:
    options, shared = Options.from_mapping(recipe.options), shared_here()
    if options.compile == "behind":
        shared.compile_service.start()
    target = None if options.target is None else find_target(options.target)
    return GraphBuilder(
        shared, options, recipe.policies, FunctionPolicy(), CapturedFunction(recipe.function), target=target
    )
