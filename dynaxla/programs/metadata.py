"""Metadata of programs on disk, beside the executables: with it a later process neither pads a part nor lists its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaxla.cache.key import Key
from dynaxla.cache.kinds import METADATA
from dynaxla.ops.table import OpTable
from dynaxla.options import Options
from dynaxla.programs.outline_pickling import CannotSerialize, pack_outline, unpack_outline
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.program import CompiledProgram
from dynaxla.programs.specialization import ArgumentSpec, ExactSpec, ProgramSpec
from dynaxla.runtime.client import Client
from dynaxla.runtime.executable_cache import ExecutableCache

_DIGITS = 64
"""Of a digest."""


@dataclass(frozen=True, slots=True)
class MetadataCache:
    """Attributes:
    executables: the cache of executables, and of their metadata.
    client: loads executables.
    table: the records of the ops.
    options: the backend's.
    """

    executables: ExecutableCache
    client: Client
    table: OpTable
    options: Options

    def key(self, graphs: PartGraphs, place: ProgramSpec) -> Key | None:
        """The key of a part at a place, for which nothing needs to be padded; None where that does not determine the
        program: it calls what is the user's, or what no key can name."""
        listed = _listed(place) if graphs.sizes else "its own sizes"
        return None if listed is None else self._key(graphs, listed)

    def fold_key(self, graphs: PartGraphs) -> Key | None:
        """The key of what a part's weights alone determine; None where it is not named."""
        return self._key(graphs, "fold")

    def _key(self, graphs: PartGraphs, place: object) -> Key | None:
        name = graphs.name if self.executables.active else None
        if name is None or not graphs.is_named_by(self.table):
            return None
        environment, dtype = self.executables.environment(self.client), str(torch.get_default_dtype())
        return METADATA.key(self.options, environment, part=name, place=place, default_dtype=dtype)

    def find(self, key: Key | None) -> CompiledProgram | None:
        """The program that is stored under a key, loaded; None where its metadata or its executable is not there."""
        content = None if key is None else self.executables.find_metadata(key)
        if content is None:
            return None
        digest, outline = content[:_DIGITS].decode().strip(), unpack_outline(content[_DIGITS:])
        if not digest:
            return CompiledProgram(None, outline)
        executable = self.executables.find(Key(digest), self.client)
        return None if executable is None else CompiledProgram(executable, outline)

    def put(self, key: Key, made: CompiledProgram, executable: Key | None) -> None:
        """Stores the metadata of a program.

        Args:
            executable: the key of its executable; None where that is not stored.
        """
        if made.executable is not None and executable is None:
            return
        digest = "" if executable is None else executable.digest
        try:
            self.executables.put_metadata(key, digest.ljust(_DIGITS).encode() + pack_outline(made.outline))
        except CannotSerialize:
            return  # a value of the user's among the outputs


def _listed(place: ProgramSpec) -> object | None:
    """What says which place it is."""
    if not isinstance(place, ExactSpec):
        buckets = place.buckets
        same = [(str(symbol), str(its)) for symbol, its in buckets.same.items()]
        sizes = [[(str(symbol), size) for symbol, size in each.items()] for each in (buckets.padded, buckets.fixed)]
        return "bucket", sizes, same, list(map(str, buckets.scalars)), list(map(str, place.order))
    listed = _arguments(place.arguments)
    return None if listed is None else ("sizes", listed)


def _arguments(arguments: Sequence[Any]) -> list[object] | None:
    described = [ArgumentSpec.of(each) for each in arguments]
    if not all(isinstance(each, (ArgumentSpec, int, float)) or each is None for each in described):
        return None
    return [
        (each.shape, each.strides, str(each.dtype), str(each.device)) if isinstance(each, ArgumentSpec) else each
        for each in described
    ]
