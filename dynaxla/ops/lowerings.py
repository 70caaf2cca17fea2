"""How every op is lowered: one immutable value, which grows by making another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from dynaxla.errors import OptionError
from dynaxla.forking import new_lock
from dynaxla.ops.spec import OpSpec, PadRule, Support

Rule = Callable[..., Any]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Lowering:
    """One op: its row, its JAX body and what it does to padding.

    Attributes:
        row: says which calls are taken.
        rule: the body; None for a row that has none (it is decomposed, or runs in eager).
        pad: None means that it cannot run on padded values.
    """

    row: OpSpec
    rule: Rule | None = None
    pad: PadRule | None = None


@dataclass(frozen=True, slots=True)
class Lowerings:
    """Every op that is known. Read-only: `adding` gives another value.

    Attributes:
        rows: the row of each op.
        rules: the JAX function of each op that has one.
        pads: the pad rule of each op that has one.
    """

    rows: Mapping[OpOverload, OpSpec] = field(default_factory=lambda: MappingProxyType({}))
    rules: Mapping[OpOverload, Rule] = field(default_factory=lambda: MappingProxyType({}))
    pads: Mapping[OpOverload, PadRule] = field(default_factory=lambda: MappingProxyType({}))

    def adding(self, new: Iterable[Lowering], *, replace: bool = False) -> Lowerings:
        """These and others.

        Raises:
            OptionError: there is one for an op already, and `replace` is False.
        """
        rows, rules, pads = dict(self.rows), dict(self.rules), dict(self.pads)
        for one in new:
            target = one.row.target
            if target in rows and not replace:
                raise OptionError(f"{target} has a lowering already", "replace=True puts another in its place")
            rows[target] = one.row
            _set(rules, target, one.rule)
            _set(pads, target, one.pad)
        return Lowerings(MappingProxyType(rows), MappingProxyType(rules), MappingProxyType(pads))

    def takes_rule(self, target: object) -> bool:
        """Whether an op may be lowered by a JAX function."""
        row = self.rows.get(target)  # type: ignore[call-overload]
        return row is not None and row.support in (Support.JAX, Support.LOWERED)

    def torch_mlir_takes(self, target: object, dtypes: Iterable[torch.dtype]) -> bool:
        """Whether torch-mlir itself lowers a call with tensor operands (or, without any, results) of `dtypes`."""
        row = self.rows.get(target)  # type: ignore[call-overload]
        return row is None or (row.support is not Support.JAX and row.lowered.issuperset(dtypes))


def _set(table: dict[OpOverload, _Value], target: OpOverload, value: _Value | None) -> None:
    table.pop(target, None)
    if value is not None:
        table[target] = value


class Registered:
    """The lowerings of a process, which grow while it runs. A graph is compiled with those there are by then."""

    def __init__(self, first: Lowerings) -> None:
        self._current = first
        self._lock = new_lock()

    @property
    def current(self) -> Lowerings:
        return self._current

    def add(self, new: Iterable[Lowering], *, replace: bool = False) -> None:
        """Adds all of them, or none.

        Raises:
            OptionError: there is one for an op already, and `replace` is False.
        """
        with self._lock:
            self._current = self._current.adding(new, replace=replace)
