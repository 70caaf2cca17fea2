"""One call of the symbolic graph, as a pad rule sees it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import Argument

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, Takes
from dynaxla.bucketing.padded_graph_builder import Builder
from dynaxla.bucketing.padded_value import Dim, Number, Operand, Padded, Unpaddable, places
from dynaxla.bucketing.size_expressions import Size, is_varying
from dynaxla.torch_api.overloads import OpOverload, base_name, parameters


@dataclass(frozen=True, slots=True)
class Call:
    """A call and where its padded form is built.

    Attributes:
        node: the call in the symbolic graph.
        build: makes nodes of the padded program.
        given: the arguments by their names in the op's schema, defaults filled in; a tensor is a `Padded`, a size that
            varies an expression, which stands for its true value.
        takes: what the op's rule takes each argument for.
    """

    node: Node
    build: Builder
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
    def tensors(self) -> list[Padded]:
        return [value for value in self.given.values() if isinstance(value, Padded)]

    def same(self, /, **changed: Operand) -> Node:
        """The same op on padded values. Arguments that its rule takes for bucket sizes get the bucket's.

        `changed` arguments replace the call's.

        Raises:
            Unpaddable: an argument is a true size that varies: it has to be computed in the program.
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
        """An argument as given; sizes that the rule takes for the bucket's as these."""
        value: Operand = self.given[name]
        if self.takes[name] is not BUCKET_SIZE:
            return value
        if isinstance(value, list):
            return [self._padded(size) for size in value]
        return self._padded(value)

    def _padded(self, size: Size | None) -> Size | None:
        return self.build.padded(size) if is_varying(size) else size

    def result(self, node: Node, dims: tuple[Dim, ...], fill: Number | None = None) -> Padded:
        """The call's result.

        Raises:
            Unpaddable: the dims are not what the op gives: the rule does not fit the call.
        """
        shape = tuple(node.meta["val"].shape)
        if shape != tuple(map(places, dims)):
            raise Unpaddable(f"the padded result has shape {shape}, its rule says {tuple(map(places, dims))}")
        return Padded(node, dims, fill)

    def first(self, node: Node, dims: tuple[Dim, ...], along: Sequence[int]) -> Padded:
        """The call's result, cut or lengthened to the places of `dims` along some dims, where real elements come first.

        The op makes as many places as its padded operands give. That may be more than the result needs (a guard may have made
        its size one number) or fewer (the bound of its size may lie above what the bucket gives).
        """
        for place in along:
            node = self.build.resized(node, place, places(dims[place]))
        return self.result(node, dims)

    def results(self, node: Node, dims: Sequence[tuple[Dim, ...]]) -> tuple[Padded, ...]:
        """The results of an op that gives several."""
        picks = [self.build.emit(operator.getitem, node, i) for i in range(len(dims))]
        return tuple(self.result(pick, each) for pick, each in zip(picks, dims, strict=True))

    def dim(self, name: str, value: Padded) -> int:
        """An argument that names a dim of `value`, counted from the front."""
        rank = max(len(value.dims), 1)
        return int(self.given[name]) % rank


def unwrap(value: Any, name: str = "argument") -> Argument:
    """An argument for a node: nodes for padded values; sizes must be plain."""
    if isinstance(value, Padded):
        return value.node
    if isinstance(value, (list, tuple)):
        return [unwrap(v, name) for v in value]
    if is_varying(value) or isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unpaddable(f"its {name} is the size {value}")
    plain: Argument = value
    return plain
