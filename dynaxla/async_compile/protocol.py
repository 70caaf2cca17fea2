"""Requests to the compile child, and its answers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule

from dynaxla.diagnostics import ExactShape
from dynaxla.ops.table import OpTable, core_table
from dynaxla.options import Options
from dynaxla.programs.outline_pickling import CannotSerialize, pickle_value
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.program import ProgramMetadata
from dynaxla.programs.specialization import ProgramSpec
from dynaxla.torch_api.graph_pickling import CannotPickle, dumps, loads
from dynaxla.types import DONATED, SOURCE, Saved

_META = ("val", *SOURCE, DONATED)


@dataclass(frozen=True, slots=True)
class SerializedPart:
    """A part in bytes.

    Attributes:
        digest: names it.
    """

    digest: str
    data: bytes

    @classmethod
    def of(cls, graphs: PartGraphs, table: OpTable, fold: bool) -> SerializedPart:
        """The part's graphs; of its constants only what the graph says of them.

        Raises:
            CannotShip: something of it is in this process alone.
        """
        if (foreign := table.find_user_op(graphs.graph)) is not None:
            raise CannotSerialize(f"{foreign} is known to this process alone")
        about = (graphs.weights, len(graphs.constants), fold, graphs.saved)
        try:
            data = dumps((graphs.graph, *about), _META)
        except CannotPickle as error:
            raise CannotSerialize(f"its graph does not pickle: {error}") from error
        return cls(hashlib.sha256(data).hexdigest(), data)

    def unpack(self) -> PartGraphs:
        """The same part in another process, with empty constants: it is there to be compiled, not to run in eager.

        Raises:
            CannotShip: an operator is not known here.
        """
        graph: Graph
        weights: tuple[int, ...]
        saved: Saved
        try:
            graph, weights, constants, fold, saved = loads(self.data)
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise CannotSerialize(f"its graph cannot be read elsewhere: {error}") from error
        nothing = [torch.empty(0)] * constants
        return PartGraphs(GraphModule(torch.nn.Module(), graph), weights, nothing, fold, core_table().pads, saved)


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """Attributes:
    digest: of the part.
    part: the part; None where the child should know it.
    spec: the bucket or the exact sizes to compile it for, pickle_value.
    fold: whether to compile the program of the work on weights alone, too.
    options: the user's, with `matmul_precision` as it is in the caller's process.
    default_dtype: torch's.
    jax: JAX's settings.
    """

    digest: str
    part: SerializedPart | None
    spec: bytes
    fold: bool
    options: Options
    default_dtype: torch.dtype
    jax: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Attributes:
    counts: how many calls had which sizes.
    have: cells whose programs are there.
    most: cells.
    powers: how often each size is a factor of the elements.
    price: padding, in elements, that a new cell has to save.
    """

    counts: Mapping[tuple[int, ...], float]
    have: frozenset[tuple[int, ...]]
    most: int
    powers: tuple[int, ...]
    price: float


@dataclass(frozen=True, slots=True)
class PlanReply:
    """Attributes:
    plan: as JSON.
    """

    plan: str


@dataclass(frozen=True, slots=True)
class CompileReply:
    """Attributes:
    executable, fold: serialized; None where there is none, or none was wanted.
    outline: of the program.
    counters: what the recorder counted.
    log_lines: warnings, for the caller's log.
    """

    executable: bytes | None
    fold: bytes | None
    outline: ProgramMetadata
    counters: Mapping[str, float]
    log_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnknownPart:
    """The child was not sent the part yet, or dropped it."""


@dataclass(frozen=True, slots=True)
class PaddingRefused:
    """Padding could change a result; see `CannotPad`."""

    reason: ExactShape
    of_bucket: bool


@dataclass(frozen=True, slots=True)
class NotSerializable:
    """The part has to be compiled in the caller's process, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class CompileFailed:
    """It cannot be compiled.

    Attributes:
        explanation: what the user reads.
        log_lines: warnings, for the caller's log.
    """

    explanation: str
    log_lines: tuple[str, ...]


Answer = CompileReply | PlanReply | UnknownPart | PaddingRefused | NotSerializable | CompileFailed


def pack_spec(spec: ProgramSpec) -> bytes:
    """Raises CannotShip where something in it does not pickle."""
    try:
        return dumps(spec, _META)
    except CannotPickle as error:
        raise CannotSerialize(f"its sizes do not pickle: {error}") from error


def unpack_spec(data: bytes) -> ProgramSpec:
    spec: ProgramSpec = loads(data)
    return spec


def pack_answer(answer: Answer) -> bytes:
    return pickle_value(answer)


def unpack_answer(data: bytes) -> Answer:
    answer: Answer = pickle.loads(data)
    return answer
