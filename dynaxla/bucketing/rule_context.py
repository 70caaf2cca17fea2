"""What a pad rule is called with: one call of the symbolic graph, and the padded graph under construction."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import Argument

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, Takes
from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.bucketing.padded_value import Dim, Number, Operand, PaddedValue, Unpaddable, padded_size
from dynaxla.bucketing.size_expressions import Size, is_varying
from dynaxla.torch_api.overloads import OpOverload, base_name, parameters


@dataclass(frozen=True, slots=True)
class RuleContext:
    """One call of the symbolic graph, for its pad rule.

    Attributes:
        node: the call in the symbolic graph.
        build: appends nodes to the padded program.
        given: the arguments by name, defaults filled in; a tensor is a padded value, a symbolic size an expression, which
            means its true value.
        takes: the role of each argument.
    """

    node: Node
    build: PaddedGraphBuilder
    given: dict[str, Any]
    takes: Mapping[str, Takes | None]

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    @property
    def op(self) -> OpOverload:
        assert isinstance(self.node.target, OpOverload)
        return self.node.target

    @property
    def op_name(self) -> str:
        """The name that the op's overloads share, such as "sum"."""
        return base_name(self.op)

    @property
    def true_sizes(self) -> tuple[Size, ...]:
        """The true sizes of the (first) result."""
        value = self.node.meta["val"]
        return self.build.known_sizes(value if isinstance(value, torch.Tensor) else value[0])

    @property
    def tensors(self) -> list[PaddedValue]:
        return [value for value in self.given.values() if isinstance(value, PaddedValue)]

    def same(self, /, **changed: Operand) -> Node:
        """Emits the same op on padded values. Arguments with the role BUCKET_SIZE get the bucket's sizes.

        Args:
            changed: arguments, by name, that replace the call's.

        Raises:
            Unpaddable: an argument is a symbolic true size, which would have to be computed in the program.
        """
        args, kwargs = [], {}
        for argument in parameters(self.op):
            name = argument.name
            value = changed[name] if name in changed else self._at_bucket(name)
            value = unwrap(value, name)
            if argument.kwarg_only:
                kwargs[name] = value
            else:
                args.append(value)
        return self.build.emit(self.op, *args, **kwargs)

    def _at_bucket(self, name: str) -> Operand:
        """An argument of the call; with the role BUCKET_SIZE its sizes are replaced by the bucket's."""
        value: Operand = self.given[name]
        if self.takes[name] is not BUCKET_SIZE:
            return value
        if isinstance(value, list):
            return [self._padded(size) for size in value]
        return self._padded(value)

    def _padded(self, size: Size | None) -> Size | None:
        return self.build.padded_size_of(size) if is_varying(size) else size

    def result(self, node: Node, dims: tuple[Dim, ...], fill: Number | None = None) -> PaddedValue:
        """The padded value of the call's result.

        Raises:
            Unpaddable: `node` does not have the padded sizes of `dims`: the rule does not fit the call.
        """
        shape = tuple(node.meta["val"].shape)
        if shape != tuple(map(padded_size, dims)):
            raise Unpaddable(f"the padded result has shape {shape}, its rule says {tuple(map(padded_size, dims))}")
        return PaddedValue(node, dims, fill)

    def first(self, node: Node, dims: tuple[Dim, ...], along: Sequence[int]) -> PaddedValue:
        """The padded value of the call's result, sliced or padded to the sizes of `dims` along the dims `along`, where real
        elements come first.

        The op's result has the size that its padded operands imply. That may be more than the result needs (a guard may have
        fixed its size) or less (its upper bound may lie above its value at the bucket).
        """
        for place in along:
            node = self.build.resize(node, place, padded_size(dims[place]))
        return self.result(node, dims)

    def results(self, node: Node, dims: Sequence[tuple[Dim, ...]]) -> tuple[PaddedValue, ...]:
        """The results of an op that gives several."""
        picks = [self.build.emit(operator.getitem, node, i) for i in range(len(dims))]
        return tuple(self.result(pick, each) for pick, each in zip(picks, dims, strict=True))

    def dim(self, name: str, value: PaddedValue) -> int:
        """An argument that names a dim of `value`, as a non-negative index."""
        rank = max(len(value.dims), 1)
        return int(self.given[name]) % rank


def unwrap(value: Any, name: str = "argument") -> Argument:
    """Converts an argument for a node: padded values to their nodes. Raises Unpaddable for symbolic sizes."""
    if isinstance(value, PaddedValue):
        return value.node
    if isinstance(value, (list, tuple)):
        return [unwrap(v, name) for v in value]
    if is_varying(value) or isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unpaddable(f"its {name} is the size {value}")
    plain: Argument = value
    return plain
