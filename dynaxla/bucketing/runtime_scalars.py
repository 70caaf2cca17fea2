"""Runtime scalars of a padded program: numbers made of true sizes, computed in the program or passed by the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.padded_value import Unpaddable
from dynaxla.bucketing.size_expressions import Size, is_whole, size_of
from dynaxla.torch_api.fakes import mode_of
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.size_functions import (
    CeilDiv,
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    ToFloat,
    TruncToInt,
    is_printable,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ScalarVector:
    """A vector of scalars that the program takes after its tensors.

    Attributes:
        dtype: int64 or float64.
        numbers: expressions over the symbols, which the caller evaluates at every call.
    """

    dtype: torch.dtype
    numbers: tuple[Size, ...]


class RuntimeScalars:
    """The runtime scalars of a program under construction.

    The caller evaluates what has no ATen op, or one that may round differently from Python (a logarithm that must be
    exactly 3).

    Args:
        emit: appends a node to the program.
        device: where the program computes.
        vectors: the program's vector inputs: int64, which begins with the symbols' values, and float64, empty at first.
        symbols: the padded symbols.
    """

    def __init__(
        self,
        emit: Callable[..., Node],
        device: torch.device,
        vectors: Mapping[torch.dtype, Node],
        symbols: Sequence[sympy.Symbol],
    ) -> None:
        self._emit = emit
        self._device = device
        self._vectors = vectors
        self._given: dict[torch.dtype, list[Size]] = {torch.int64: list(symbols), torch.float64: []}
        self._known: dict[tuple[bool, Size], Node] = {}  # Python takes 1.0 for 1, which has another dtype

    def scalar(self, size: Size) -> Node:
        """The value of a size expression as a 0-d tensor, int64 or float64.

        Raises:
            Unpaddable: neither the program nor the caller can compute it.
        """
        size = size_of(size)
        known = isinstance(size, float), size
        if known not in self._known:
            self._known[known] = self._compute(size)
        return self._known[known]

    def list_scalar_vectors(self) -> tuple[ScalarVector, ...]:
        """The vectors that the caller has to pass. Erases the inputs of vectors that nothing reads."""
        found = []
        for dtype, node in self._vectors.items():
            if not node.users:
                node.graph.erase_node(node)
                continue
            found.append(ScalarVector(dtype, tuple(self._given[dtype])))
        return tuple(found)

    def _compute(self, size: Size) -> Node:
        if isinstance(size, float):
            return self._emit(aten.full.default, [], size, dtype=torch.float64, device=self._device)
        if isinstance(size, int) or size.is_Integer:
            return self._emit(aten.full.default, [], int(size), dtype=torch.int64, device=self._device)
        if isinstance(size, sympy.Symbol):
            return self._picked(size)
        if isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 0:
            return self.scalar(sympy.Mul(size.base, size.base ** (size.exp - 1), evaluate=False))
        for kinds, compute in _OPS.items():
            if isinstance(size, kinds):
                return compute(self._emit, [self.scalar(argument) for argument in size.args])
        if not is_printable(size):
            raise Unpaddable(f"the size {size} cannot be computed")
        return self._picked(size)

    def _picked(self, size: Size) -> Node:
        """Reads a number from a vector that the caller passes."""
        dtype = torch.int64 if is_whole(size) else torch.float64
        numbers, vector = self._given[dtype], self._vectors[dtype]
        if size not in numbers:
            numbers.append(size)
            with mode_of(vector.meta["val"]):
                vector.meta["val"] = torch.empty(len(numbers), dtype=dtype)
        return self._emit(aten.select.int, vector, 0, numbers.index(size))


_Emit = Callable[..., Node]


def _folded(target: OpOverload) -> Callable[[_Emit, Sequence[Node]], Node]:
    def compute(emit: _Emit, operands: Sequence[Node]) -> Node:
        result = operands[0]
        for operand in operands[1:]:
            result = emit(target, result, operand)
        return result

    return compute


def _rounded(target: OpOverload) -> Callable[[_Emit, Sequence[Node]], Node]:
    return lambda emit, operands: emit(aten._to_copy.default, emit(target, operands[0]), dtype=torch.int64)


def _wide(emit: _Emit, operand: Node) -> Node:
    return emit(aten._to_copy.default, operand, dtype=torch.float64)


def _quotient(emit: _Emit, operands: Sequence[Node]) -> Node:
    return emit(aten.div.Tensor, *[_wide(emit, operand) for operand in operands])


def _floor_quotient(emit: _Emit, operands: Sequence[Node]) -> Node:
    return emit(aten.div.Tensor_mode, *operands, rounding_mode="floor")


def _ceiling_quotient(emit: _Emit, operands: Sequence[Node]) -> Node:
    up = emit(aten.sub.Tensor, emit(aten.add.Tensor, *operands), 1)
    return _floor_quotient(emit, [up, operands[1]])


_OPS: Mapping[tuple[type[sympy.Expr], ...], Callable[[_Emit, Sequence[Node]], Node]] = {
    (sympy.Add,): _folded(aten.add.Tensor),
    (sympy.Mul,): _folded(aten.mul.Tensor),
    (Max, sympy.Max): _folded(aten.maximum.default),
    (Min, sympy.Min): _folded(aten.minimum.default),
    (TruncToInt,): _rounded(aten.trunc.default),
    (FloorToInt,): _rounded(aten.floor.default),
    (CeilToInt,): _rounded(aten.ceil.default),
    (CeilDiv,): _ceiling_quotient,
    (FloorDiv,): _floor_quotient,
    (IntTrueDiv, FloatTrueDiv): _quotient,
    (Mod, PythonMod): _folded(aten.remainder.Tensor),
    (sympy.Abs,): lambda emit, operands: emit(aten.abs.default, operands[0]),
    (ToFloat,): lambda emit, operands: _wide(emit, operands[0]),
}
