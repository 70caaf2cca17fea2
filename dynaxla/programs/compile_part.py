"""A part at one place, its bucket or its exact sizes, compiled: here, or in the child that works behind the calls."""

from __future__ import annotations

import time

from torch.fx import Graph

from dynaxla.cache.key import Key
from dynaxla.observe.compile_timing import Spent
from dynaxla.pipeline import Pipeline
from dynaxla.programs.metadata import KeptOutlines
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.program import Made, Outline
from dynaxla.programs.specialization import AtSizes, Place
from dynaxla.runtime.client import Executable
from dynaxla.types import StaticGraph


def make(graphs: PartGraphs, pipeline: Pipeline, place: Place, spent: Spent) -> Made:
    """The part at a place, found on disk or compiled.

    Raises:
        CannotPad: padding could change a result.
        LoweringError, LinkError, CompileError: see `Pipeline.compile`.
    """
    outlines = _outlines(pipeline)
    key = outlines.key(graphs, place)
    found = _found(outlines, key, pipeline)
    if found is not None:
        return found
    static, outline = _outlined(graphs, pipeline, place, spent)
    computes = any(source.result is not None for source in outline.outputs)  # else all are arguments or plain values
    made = Made(pipeline.compile(static.graph, spent) if computes else None, outline)
    if key is not None:
        outlines.put(key, made, pipeline.key_of(static.graph) if computes else None)
    return made


def find(graphs: PartGraphs, pipeline: Pipeline, place: Place) -> Made | None:
    """The part at a place, if it is on disk."""
    outlines = _outlines(pipeline)
    return _found(outlines, outlines.key(graphs, place), pipeline)


def find_fold(graphs: PartGraphs, pipeline: Pipeline) -> Executable | None:
    """The program of what a part's weights alone determine, if it is on disk; the part has such work."""
    return _found_fold(graphs, pipeline) or pipeline.find(_fold_graph(graphs, pipeline), fold=True)


def make_fold(graphs: PartGraphs, pipeline: Pipeline, spent: Spent) -> Executable:
    """The program of what a part's weights alone determine; the part has such work.

    Raises:
        LoweringError, LinkError, CompileError: see `Pipeline.compile`.
    """
    found = _found_fold(graphs, pipeline)
    if found is None:
        graph, outlines = _fold_graph(graphs, pipeline), _outlines(pipeline)
        found = pipeline.compile(graph, spent, fold=True)
        key = outlines.fold_key(graphs)
        if key is not None:
            outlines.put(key, Made(found, Outline((), ())), pipeline.key_of(graph))
    return found


def _found_fold(graphs: PartGraphs, pipeline: Pipeline) -> Executable | None:
    """By what the part is named, so that its graph need not be there."""
    outlines = _outlines(pipeline)
    found = None if pipeline.dump.enabled else outlines.find(outlines.fold_key(graphs))
    if found is not None:
        pipeline.recorder.add(fold_loads=1)
    return None if found is None else found.executable


def _fold_graph(graphs: PartGraphs, pipeline: Pipeline) -> Graph:
    with pipeline.tracing:
        graph = graphs.specialize_fold()
    assert graph is not None
    return graph


def _outlines(pipeline: Pipeline) -> KeptOutlines:
    return KeptOutlines(pipeline.kept, pipeline.client, pipeline.choice.table, pipeline.options)


def _found(outlines: KeptOutlines, key: Key | None, pipeline: Pipeline) -> Made | None:
    """Who wants to see the stages wants them made."""
    found = None if pipeline.dump.enabled else outlines.find(key)
    if found is not None and found.executable is not None:
        pipeline.recorder.add(loads=1)
    return found


def _outlined(graphs: PartGraphs, pipeline: Pipeline, place: Place, spent: Spent) -> tuple[StaticGraph, Outline]:
    if isinstance(place, AtSizes):
        with pipeline.tracing:
            static = graphs.specialize(place.arguments)
            donated = graphs.donated(static)
        return static, Outline(static.argument_orders, static.outputs, donated=donated)
    started = time.perf_counter()
    try:
        with pipeline.tracing:
            static, shapes, cropping = graphs.pad(place.buckets, place.order)
            donated = graphs.donated(static)
    finally:
        spent.padding_s += time.perf_counter() - started
    taken = {result for _, result in donated}
    cropping = cropping.but_for([i for i, source in enumerate(static.outputs) if source.result in taken])
    return static, Outline(static.argument_orders, static.outputs, shapes, cropping, donated)
