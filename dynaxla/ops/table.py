"""The op table: all records, by overload. A table is immutable; adding records makes a new one.

Records are read when they are first asked for: a process that finds captures and programs on disk needs none.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from types import MappingProxyType, ModuleType

from torch.fx import Graph

import dynaxla.ops
from dynaxla.bucketing.argument_roles import PadRule, check_arguments
from dynaxla.errors import OptionError
from dynaxla.isolation.forking import new_lock
from dynaxla.isolation.once import once
from dynaxla.ops.aten_calls import Form
from dynaxla.ops.record import Body, OpFamily, Record
from dynaxla.torch_api.overloads import OpOverload, is_named_by_digest


class OpTable:
    """All supported ops. Read-only: `with_records` returns a new table.

    Args:
        read: makes the records, by overload.
    """

    def __init__(self, read: Callable[[], Mapping[OpOverload, Record]] = dict) -> None:
        self._read = read

    @cached_property
    def records(self) -> Mapping[OpOverload, Record]:
        """The records, by overload."""
        return MappingProxyType(dict(self._read()))

    @cached_property
    def bodies(self) -> Mapping[OpOverload, Body]:
        """The body of each overload."""
        return MappingProxyType({op: one.body for op, one in self.records.items()})

    @cached_property
    def pads(self) -> Mapping[OpOverload, PadRule]:
        """The pad rule of each overload that has one."""
        return MappingProxyType({op: one.pad for op, one in self.records.items() if one.pad is not None})

    @cached_property
    def forms(self) -> Mapping[OpOverload, Form]:
        """The aten form of each overload that has one."""
        return MappingProxyType({op: one.as_aten for op, one in self.records.items() if one.as_aten is not None})

    def with_records(self, new: Iterable[Record], *, replace: bool = False) -> OpTable:
        """Returns a table with these records and new ones.

        Raises:
            OptionError: there is one for an op already, and `replace` is False.
        """
        records = dict(self.records)
        for record in new:
            if record.target in records and not replace:
                raise OptionError(f"{record.target} has a lowering already", "replace=True puts another in its place")
            records[record.target] = record
        return OpTable(lambda: records)

    def is_own(self, op: object) -> bool:
        """Whether a node's target has the package's own record, or no record at all: the user registered no other."""
        return self.records.get(op) is core_table().records.get(op)  # type: ignore[call-overload]

    def find_user_op(self, graph: Graph) -> object | None:
        """The first op of a graph with a user's record; None if there is none."""
        targets = (node.target for node in graph.nodes if node.op == "call_function")
        return next((op for op in targets if not self.is_own(op)), None)

    def have_known_names(self, ops: Iterable[object]) -> bool:
        """Whether the names of these ops determine what they compute, as cache keys assume."""
        return all(self.is_own(op) or (isinstance(op, OpOverload) and is_named_by_digest(op)) for op in ops)


def families() -> Iterator[tuple[ModuleType, tuple[Record, ...]]]:
    """Yields the modules of this package with their records, sorted by name; imports JAX."""
    for info in pkgutil.iter_modules(dynaxla.ops.__path__):
        module = import_module(f"{dynaxla.ops.__name__}.{info.name}")
        family = getattr(module, "OPS", None)
        if isinstance(family, OpFamily):
            yield module, family.records


@once
def core_table() -> OpTable:
    """The package's own ops. Records import JAX.

    Raises (then):
        OptionError: an overload has two records.
        TypeError: a pad rule declares no role for an argument of one of its ops.
    """
    return OpTable(_read_core_records)


def _read_core_records() -> Mapping[OpOverload, Record]:
    table = OpTable().with_records(record for _, records in families() for record in records)
    check_arguments(table.pads)
    return table.records


class OpRegistry:
    """The current op table of a process, to which users add records. A graph is compiled with the table of that moment."""

    def __init__(self, first: OpTable) -> None:
        self._current = first
        self._lock = new_lock()

    @property
    def current(self) -> OpTable:
        return self._current

    def add(self, new: Iterable[Record], *, replace: bool = False) -> None:
        """Adds all of the records, or none.

        Raises:
            OptionError: there is one for an op already, and `replace` is False.
        """
        with self._lock:
            self._current = self._current.with_records(new, replace=replace)
