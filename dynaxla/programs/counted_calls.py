"""Counts the calls of a compiled part by bucket, with their seconds: `options={"call_metrics": True}`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, cast

from dynaxla.bucketing.shape_keys import EXACT, ShapeKey, ShapeKeys
from dynaxla.observe.usage import CallCounter
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.program_cache import ProgramListener

PartFunction = Callable[[Sequence[Any]], list[Any]]


class CountedCalls(ProgramListener):
    """Counts the calls of one part, and the programs that are compiled or loaded for them.

    Args:
        counter: has the numbers.
        programs: of the part.
    """

    def __init__(self, counter: CallCounter, programs: PartPrograms) -> None:
        self._counter = counter
        self._programs = programs
        self._padded = lru_cache(maxsize=1024)(lambda key: count_padded(programs.keys, key))

    def on_put(self, values: tuple[int, ...]) -> None:
        """Counts a program for calls of these sizes."""
        self._counter.count_program(self._programs.keys.of(values))

    def wrap(self, function: PartFunction) -> PartFunction:
        """Makes a function that calls the part and counts the call: in the bucket of its sizes, whatever program served it."""
        keys, programs = self._programs.keys, self._programs
        count, padded_of = self._counter.count_call, self._padded

        def run(args: Sequence[Any]) -> list[Any]:
            values = keys.read(args)  # first: a call may give its arguments other memory
            is_hit = keys.of(values) in programs
            started = time.perf_counter()
            results = function(args)
            seconds = time.perf_counter() - started
            key, true = keys.of(values), keys.elements(values)
            count(key, seconds=seconds, is_hit=is_hit, true=true, padded=padded_of(key) or true)
            return results

        return run


def count_calls(function: PartFunction, programs: PartPrograms) -> PartFunction:
    """Makes a function that calls a part and counts its calls in the process's recorder."""
    pipeline = programs.compiler.pipeline
    most = pipeline.options.max_executables
    counter = pipeline.recorder.count_calls(pipeline.origin.what, most, lambda key: describe_bucket(programs.keys, key))
    counted = CountedCalls(counter, programs)
    programs.listeners.append(counted)
    return counted.wrap(function)


def count_padded(keys: ShapeKeys, key: ShapeKey) -> int:
    """The product of the sizes of a bucket; 0 for exact sizes."""
    scheme = keys.scheme_of(key)
    return 0 if scheme is None else math.prod(scheme.spread(keys.bucket_of(key)))


def describe_bucket(keys: ShapeKeys, key: Hashable) -> str:
    """The text of a key: the sizes of its bucket, or its exact sizes."""
    known = cast(ShapeKey, key)
    if known[:1] == (EXACT,):
        return f"exact {'x'.join(map(str, known[1:]))}"
    return "x".join(map(str, keys.bucket_of(known))) if known else "fixed"
