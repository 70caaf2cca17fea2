"""Builds a padded program: nodes at bucket sizes, true sizes as runtime scalars, and masks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Graph, Node, map_arg
from torch.fx.node import Argument

from dynaxla.bucketing.padded_value import Dim, Factor, Number, PaddedValue, Unpaddable, padded_size
from dynaxla.bucketing.runtime_scalars import RuntimeScalars, ScalarVector
from dynaxla.bucketing.size_buckets import PartBucket
from dynaxla.bucketing.size_expressions import Size, evaluate, is_fixed, simplify, size_of, upper_bound
from dynaxla.diagnostics import user_frame
from dynaxla.torch_api.fakes import FakeTensorMode
from dynaxla.torch_api.meta_kernels import run_meta_kernel
from dynaxla.torch_api.symbols import get_constant_value, guarded_values

aten = torch.ops.aten
Op: TypeAlias = Callable[..., object]
Symbolic: TypeAlias = Size | torch.SymInt | torch.SymFloat | torch.SymBool

# A dim that needs more places than this, and more than this many times its size at the bucket, costs more padded than a
# program per exact shape does.
_MANY, _WASTEFUL = 256, 4


@dataclass(frozen=True, slots=True)
class PaddingMask:
    """A value whose padding is set to a number before an op reads it.

    Attributes:
        op: the overload that would else read the padding.
        fill: the number.
        frame: the user's line of the op, or None.
    """

    op: str
    fill: Number
    frame: str | None


class PaddedGraphBuilder:
    """A padded graph under construction, at one bucket.

    Args:
        bucket: which symbols are padded to which sizes, and which are fixed.
        device: where the program computes.
        mode: the fake tensors' mode; None: a new one.
    """

    def __init__(self, bucket: PartBucket, device: torch.device, mode: FakeTensorMode | None = None) -> None:
        self.graph = Graph()
        self.mode = mode or FakeTensorMode()
        self.device = device
        self.bucket = bucket
        self._buckets = bucket.padded
        self._settled = {**bucket.same, **{symbol: sympy.Integer(size) for symbol, size in bucket.fixed.items()}}
        self._symbols = bucket.read
        self._numbers: RuntimeScalars | None = None
        self._known: dict[Size, Size] = {}
        self._equal: dict[sympy.Expr, sympy.Integer] | None = None
        self._largest: dict[Size, int | None] = {}
        self._masks: dict[Hashable, Node] = {}
        self._fakes: dict[Hashable, Any] = {}
        self.masks: list[PaddingMask] = []
        self.rewritten: Node | None = None
        self.meta: dict[str, Any] = {}  # of the node that is being rewritten; new nodes inherit it

    def placeholder(self, name: str, value: torch.Tensor | int) -> Node:
        node = self.graph.placeholder(name)
        node.meta = {"val": value}
        return node

    def fake(self, shape: Sequence[int], strides: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the dtype and device of `like`. Fake tensors are never written to, so equal ones are shared."""
        key = (tuple(shape), tuple(strides), like.dtype, like.device)
        if key not in self._fakes:
            with self.mode:
                self._fakes[key] = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
        found: torch.Tensor = self._fakes[key]
        return found

    def number_placeholders(self) -> None:
        """Appends the program's last inputs: the vectors of runtime scalars, int64 and float64, which `scalar` reads."""
        with self.mode:
            sizes = self.placeholder("true_sizes", torch.empty(len(self._symbols), dtype=torch.int64))
            numbers = self.placeholder("true_numbers", torch.empty(0, dtype=torch.float64))
        vectors = {torch.int64: sizes, torch.float64: numbers}
        self._numbers = RuntimeScalars(self.emit, self.device, vectors, self._symbols)

    def list_scalar_vectors(self) -> tuple[ScalarVector, ...]:
        """The vectors of runtime scalars that the caller has to pass. Call it once, when the graph is complete."""
        assert self._numbers is not None
        return self._numbers.list_scalar_vectors()

    def emit(self, target: Op, *args: Argument, **kwargs: Argument) -> Node:
        """Appends a call at padded sizes."""
        node = self.graph.call_function(target, args, kwargs)
        key = (target, _spec(args), _spec(tuple(kwargs.items())))
        if key not in self._fakes:  # the layers of a model make the same calls again, and a fake call takes 0.2 ms
            self._fakes[key] = self._fake_call(target, args, kwargs)
        node.meta = {**self.meta, "val": self._fakes[key]}
        return node

    def _fake_call(self, target: Op, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> object:
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        # A view is a reshape of row-major values, whatever strides the fake tensor has.
        runner = aten.reshape.default if target is aten.view.default else target
        made = run_meta_kernel(self.mode, runner, fake_args, fake_kwargs)
        if isinstance(made, torch.Tensor) and (made.is_conj() or made.is_neg()):  # an array has no lazy bits
            return made.resolve_conj().resolve_neg()
        return made

    def substitute(self, size: Symbolic) -> Size:
        """A size of the symbolic graph, expressed by the padded symbols: fixed and equal symbols are substituted."""
        expression = size_of(size)
        if is_fixed(expression):
            return expression
        if expression not in self._known:
            only = get_constant_value(size) if isinstance(size, torch.SymInt) else None
            self._known[expression] = self._simplest(size, expression) if only is None else only
        return self._known[expression]

    def _simplest(self, size: Symbolic, expression: sympy.Expr) -> Size:
        equal = self._guarded(size)
        found = size_of(expression.subs(equal)) if equal else expression  # xreplace leaves parts of sums
        return found if is_fixed(found) else simplify(size_of(found.xreplace(self._settled)))

    def _guarded(self, size: Symbolic) -> dict[sympy.Expr, sympy.Integer]:
        """Values of expressions that the graph's guards fix. All sizes of a graph share one shape environment."""
        if self._equal is None and isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self._equal = guarded_values(size)
        return self._equal or {}

    def known_sizes(self, value: torch.Tensor) -> tuple[Size, ...]:
        return tuple(self.substitute(size) for size in value.shape)

    def upper_bound_of(self, size: Size) -> int | None:
        """An upper bound of a size over all true sizes of the bucket; None if none is known."""
        if size not in self._largest:
            self._largest[size] = upper_bound(size, self._buckets)
        return self._largest[size]

    def padded_size_of(self, size: Size) -> int:
        """The padded size of a size expression: its upper bound over all true sizes of the bucket.

        Raises:
            Unpaddable: it has no bound, or one far above its value at most sizes of the bucket, as quotients may have.
        """
        found = self.upper_bound_of(size)
        if found is None:
            raise Unpaddable(f"nothing bounds the size {size}")
        if found > _MANY and found > _WASTEFUL * evaluate(size, self._buckets):
            raise Unpaddable(f"the size {size} may be {found}, many times what it mostly is", of_bucket=True)
        return found

    def factor(self, size: Size) -> Factor:
        """The factor of a dim with this true size.

        Raises:
            Unpaddable: its padded size is at most 1, so that it would broadcast.
        """
        places_ = self.padded_size_of(size)
        if not is_fixed(size) and places_ < 2:
            raise Unpaddable(f"the bucket of the size {size} is {places_}", of_bucket=True)
        return Factor(places_, size)

    def dims(self, sizes: Sequence[Size]) -> tuple[Dim, ...]:
        """Dims of one factor each."""
        return tuple((self.factor(size),) for size in sizes)

    def true_dims(self, value: torch.Tensor) -> tuple[Dim, ...]:
        """Dims of one factor each, for a fake tensor of the symbolic graph."""
        return self.dims(self.known_sizes(value))

    def scalar(self, size: Size) -> Node:
        """The true value of a size expression as a 0-d tensor, int64 or float64.

        Raises:
            Unpaddable: neither the program nor the caller can compute it.
        """
        assert self._numbers is not None
        return self._numbers.scalar(size)

    def valid(self, dim: Dim) -> Node:
        """A boolean vector over a dim, True where the element is real."""
        key = tuple((f.padded, f.size) for f in dim)
        if key not in self._masks:
            self._masks[key] = self._valid(dim)
        return self._masks[key]

    def _valid(self, dim: Dim) -> Node:
        mask: Node | None = None
        for position, factor in enumerate(dim):
            if factor.is_full:
                continue
            places_ = self.emit(aten.arange.default, factor.padded, dtype=torch.int64, device=self.device)
            part = self.emit(aten.lt.Tensor, places_, self.scalar(factor.size))
            shape = [1] * len(dim)
            shape[position] = factor.padded
            part = self.emit(aten.view.default, part, shape)
            mask = part if mask is None else self.emit(aten.logical_and.default, mask, part)
        assert mask is not None, "a full dim needs no mask"
        whole = self.emit(aten.expand.default, mask, [factor.padded for factor in dim])
        return self.emit(aten.view.default, whole, [padded_size(dim)])

    def mask(self, value: PaddedValue, dims: Sequence[int], fill: Number) -> PaddedValue:
        """`value` with `fill` at every padding position along `dims`; `value` itself if its padding is known to hold `fill`."""
        rank = len(value.dims)
        wanted = [d % rank for d in dims if not all(f.is_full for f in value.dims[d % rank])]
        if not wanted or (value.fill is not None and _same(value.fill, fill)):
            return value
        valid: Node | None = None
        for d in wanted:
            shape = [1] * rank
            shape[d] = padded_size(value.dims[d])
            along = self.emit(aten.view.default, self.valid(value.dims[d]), shape)
            valid = along if valid is None else self.emit(aten.logical_and.default, valid, along)
        filler = self.emit(aten.full.default, [], fill, dtype=value.meta.dtype, device=self.device)
        node = self.emit(aten.where.self, valid, value.node, filler)
        if self.rewritten is not None:
            self.masks.append(PaddingMask(str(self.rewritten.target), fill, user_frame(self.rewritten)))
        others = [d for d in range(rank) if d not in wanted and not all(f.is_full for f in value.dims[d])]
        return PaddedValue(node, value.dims, None if others else fill)

    def restride(self, node: Node, strides: Sequence[int]) -> Node:
        """The value, copied so that its memory has these dense strides; itself if it has them."""
        value = node.meta["val"]
        order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
        if value.permute(order).is_contiguous():
            return node
        permuted = self.emit(aten.permute.default, node, order)
        dense = self.emit(aten.clone.default, permuted, memory_format=torch.contiguous_format)
        back: list[int] = sorted(range(len(order)), key=order.__getitem__)
        return self.emit(aten.permute.default, dense, back)

    def resize(self, node: Node, dim: int, places_: int) -> Node:
        """The value with one dim sliced or zero-padded to `places_` positions."""
        now = node.meta["val"].shape[dim]
        if places_ < now:
            return self.emit(aten.slice.Tensor, node, dim, 0, places_)
        if places_ > now:
            rank = node.meta["val"].dim()
            amounts = [0] * (2 * rank)
            amounts[2 * (rank - 1 - dim) + 1] = places_ - now
            return self.emit(aten.constant_pad_nd.default, node, amounts, 0)
        return node


def _spec(value: object) -> Hashable:
    """The part of an argument on which the result of a fake call depends. 1, 1.0 and True differ."""
    if isinstance(value, Node):
        return _spec(value.meta["val"])
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_spec, value))
    return type(value), value


def _same(a: Number, b: Number) -> bool:
    return type(a) is type(b) and (a == b or a != a) if isinstance(a, bool) or isinstance(b, bool) else bool(a == b)
