"""Outlines of programs in bytes, for other processes."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

from dynaxla.bucketing.size_expressions import compile_source
from dynaxla.programs.program import ProgramMetadata


class CannotSerialize(Exception):
    """A part cannot be compiled in another process; the text says why."""


class _Pickler(pickle.Pickler):
    """Functions of sizes go as their code."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and obj.__name__ == "<lambda>" and obj.__doc__:
            return compile_source, (obj.__doc__,)
        return NotImplemented


def pickle_value(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def pack_outline(outline: ProgramMetadata) -> bytes:
    """Raises CannotShip where something in it does not pickle."""
    try:
        return pickle_value(outline)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CannotSerialize(f"it does not pickle: {error}") from error


def unpack_outline(data: bytes) -> ProgramMetadata:
    outline: ProgramMetadata = pickle.loads(data)
    return outline
