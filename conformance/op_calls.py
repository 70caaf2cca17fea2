"""Collects calls of ATen overloads while OpInfo's samples run in eager, and adds calls that OpInfo never makes."""

from __future__ import annotations

import math
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.own_calls import own_calls
from conformance.rare_calls import rare_calls

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
RARER_DTYPES = (torch.float64, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64)
MIXED_DTYPES = ((torch.float32, torch.int64), (torch.int64, torch.float32), (torch.bfloat16, torch.float32))
EDGES = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 0.1, -0.3, 1e-3, -100.0, 6e4, 1e30)
WHOLE_EDGES = (1, 2, 7, 100, -1, -8, 2**31 - 1, 1 - 2**31)  # no zero: as a divisor it would make eager refuse the call
SAMPLES_PER_OP = 24
POOL = 64  # calls of one overload and dtype among which some are chosen
CALLS_PER_DTYPE = 8
CALLS_PER_RARER_DTYPE = 2
OPS_WITHOUT_NEWS = (
    "fft.",
    "linalg.",
    "signal.",
    "sparse.",
    "special.",
    "svd",
    "torch._scaled_mm",
    "torch.ops.aten._flash",
)
OPS_WITH_NEWS = ("linalg.diagonal", "linalg.vector_norm")  # although their names begin with one of those


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        leaves: the flattened (args, kwargs), with real tensors.
        treespec: how they unflatten.
        beyond_eager: eager refuses the call, or must not be asked: the op's body alone says what is right.
    """

    target: OpOverload
    leaves: tuple[Any, ...]
    treespec: pytree.TreeSpec
    beyond_eager: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def dtype(self) -> str:
        """Name of the dtype the call is filed under: its first tensor's (after a condition), or else its result's."""
        tensors = self.tensors
        if self.target._schema.arguments and self.target._schema.arguments[0].name == "condition":
            tensors = tensors[1:] or tensors
        if not tensors:
            tensors = [x for x in pytree.tree_leaves(self.run()) if isinstance(x, torch.Tensor)]
        return str(tensors[0].dtype).removeprefix("torch.")

    @property
    def dtypes(self) -> frozenset[str]:
        """Names of the dtypes of all its tensors."""
        return frozenset(str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors) or frozenset({self.dtype})

    def run(self) -> Any:
        args, kwargs = pytree.tree_unflatten(list(self.leaves), self.treespec)
        return self.target(*args, **kwargs)

    def exact_key(self) -> str:
        return repr([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in self.leaves])

    def shape_class(self) -> str:
        """What makes a call a different case for a compiler: ranks, broadcast or unit sizes, plain arguments."""
        sizes = [size for x in self.tensors for size in x.shape]
        ranks = [(x.dim(), x.dtype) for x in self.tensors]
        broadcast = len({tuple(x.shape) for x in self.tensors}) > 1
        plain = [x for x in self.leaves if not isinstance(x, torch.Tensor)]
        return repr((ranks, 1 in sizes, broadcast, plain))


class CallCollector(TorchDispatchMode):
    """Keeps up to CALLS_PER_DTYPE calls (fewer of a rarer dtype) of each wanted overload, of all shape classes."""

    def __init__(self, wanted: Collection[OpOverload]) -> None:
        super().__init__()
        self._wanted = wanted
        self._seen: set[tuple[OpOverload, str]] = set()
        self._chosen: dict[tuple[OpOverload, str], list[Call]] = defaultdict(list)
        self._reserve: dict[tuple[OpOverload, str], list[Call]] = defaultdict(list)
        self._always: dict[OpOverload, list[Call]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._wanted:
            self.offer(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def offer(self, target: OpOverload, args: Any, kwargs: Any) -> None:
        """Keep the call if it adds something; its tensors are copied, since the caller may write to them."""
        leaves, treespec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(x, torch.Tensor) and (x.layout != torch.strided or not x.numel()) for x in leaves):
            return  # empty tensors take the body anyhow
        kept = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        call = Call(target, tuple(kept), treespec)
        place = (target, call.dtype)
        if (target, call.exact_key()) in self._seen:
            return
        self._seen.add((target, call.exact_key()))
        is_new = (target, call.shape_class()) not in self._seen
        self._seen.add((target, call.shape_class()))
        pool = self._chosen[place] if is_new else self._reserve[place]
        if len(pool) < POOL:
            pool.append(call)

    def keep(self, target: OpOverload, args: tuple[Any, ...]) -> None:
        """Keep the call, however many there are; arguments by name are in a mapping behind the others."""
        named = args[-1] if args and isinstance(args[-1], dict) else {}
        leaves, treespec = pytree.tree_flatten((args[: len(args) - bool(named)], named))
        self._always[target].append(Call(target, tuple(leaves), treespec))

    def calls(self) -> dict[OpOverload, list[Call]]:
        """The calls kept, by overload."""
        result: dict[OpOverload, list[Call]] = defaultdict(list)
        for place, chosen in self._chosen.items():
            limit = _limit(chosen[0])
            result[place[0]] += (_spread(chosen, limit) + self._reserve[place])[:limit]
        for target, kept in self._always.items():
            result[target] += kept
        return result


def _spread(calls: list[Call], limit: int) -> list[Call]:
    """At most `limit` of the calls: with operands of no dims, then from all over the list."""
    scalar = [call for call in calls if any(not t.dim() for t in call.tensors)]
    special = [*scalar[-1:], *scalar[:1]][: limit // 2]
    places = {place * len(calls) // limit for place in range(limit)} if calls else set()
    ordered = {id(call): call for call in [*special, *(calls[place] for place in sorted(places)), *calls]}
    return list(ordered.values())[:limit]


def _limit(call: Call) -> int:
    common = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    return CALLS_PER_DTYPE if call.dtype in common else CALLS_PER_RARER_DTYPE


def has_news(name: str) -> bool:
    """Whether the samples of the OpInfo `name` call ops that no quicker samples call."""
    return name in OPS_WITH_NEWS or not name.startswith(OPS_WITHOUT_NEWS)


def collect(wanted: Collection[OpOverload], only: Callable[[str], bool] = has_news) -> CallCollector:
    """Run OpInfo's samples, and return the calls of `wanted` that came by; backward only if `wanted` has such ops."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    random.seed(0)
    collector = CallCollector(wanted)
    with_backward = any("backward" in str(target) for target in wanted)
    theirs = any(target.namespace == "aten" for target in wanted)
    for op in op_db:
        if not (theirs and only(op.name)):
            continue
        for dtype in DTYPES + RARER_DTYPES:
            if dtype in op.dtypes:
                _run_samples(op, dtype, collector, with_backward)
    for target, args in direct_calls(wanted, _operands):
        collector.offer(target, args, {})
    for target, args in direct_calls(wanted, _edge_operands):
        collector.keep(target, args)
    for target, args in (*own_calls(wanted), *rare_calls(wanted)):
        collector.keep(target, args)
    return collector


def _run_samples(op: Any, dtype: torch.dtype, collector: CallCollector, with_backward: bool) -> None:
    wants_grad = with_backward and op.supports_autograd and dtype.is_floating_point
    try:
        for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=wants_grad)):
            if index >= SAMPLES_PER_OP:
                return
            with collector:
                _run_sample(op, sample, wants_grad)
    # Samples of some ops are meant to fail, each with its own error.
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError, AttributeError):
        return


def _run_sample(op: Any, sample: Any, wants_grad: bool) -> None:
    results = pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
    differentiable = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if wants_grad and differentiable:
        torch.autograd.backward(differentiable, [torch.randn_like(r) for r in differentiable])


def direct_calls(
    wanted: Collection[OpOverload], operands: Callable[[list[str]], Iterator[tuple[Any, ...]]]
) -> Iterator[tuple[OpOverload, tuple[Any, ...]]]:
    """Yield calls built from the schema, for overloads of tensors and scalars only, that eager accepts."""
    for target in wanted:
        arguments = target._schema.arguments
        kinds = [str(a.type) for a in arguments if not a.kwarg_only and not a.has_default_value()]
        if not kinds or not set(kinds) <= {"Tensor", "number"} or any(a.alias_info for a in arguments):
            continue
        for args in operands(kinds):
            try:
                target(*args)
            except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
                continue
            yield target, args


def _operands(kinds: list[str]) -> Iterator[tuple[Any, ...]]:
    shapes = [((3, 4), (3, 4)), ((3, 1), (4,)), ((2, 3), ()), ((), (2,)), ((), ())]
    for dtype in DTYPES + RARER_DTYPES:
        for first, rest in shapes:
            for scalar in (2, 0.5, -3, True):
                generator = torch.Generator().manual_seed(1)
                tensors = [_values(first if i == 0 else rest, dtype, generator) for i in range(len(kinds))]
                yield tuple(t if kind == "Tensor" else scalar for t, kind in zip(tensors, kinds, strict=True))
                if "number" not in kinds:
                    break


def _values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator) * 3
    if dtype == torch.bool:
        return values > 0
    inexact = dtype.is_floating_point or dtype.is_complex
    return (values if inexact else values.abs() + 1).to(dtype)


def _edge_operands(kinds: list[str]) -> Iterator[tuple[Any, ...]]:
    """Values at the edges of each dtype, every one with every other; and operands of two dtypes."""
    dims = kinds.count("Tensor")
    for dtype in DTYPES + RARER_DTYPES:
        for scalar in (3, -0.5) if "number" in kinds else (0,):
            axes = iter(range(dims))
            yield tuple(_edges(dtype, next(axes), dims) if kind == "Tensor" else scalar for kind in kinds)
    if kinds == ["Tensor", "Tensor"]:
        for first, second in MIXED_DTYPES:
            yield torch.ones(2, 1, dtype=first), torch.full((3,), 2, dtype=second)
            yield torch.ones(2, dtype=first), torch.tensor(2, dtype=second)


def _edges(dtype: torch.dtype, axis: int, dims: int) -> torch.Tensor:
    inexact = dtype.is_floating_point or dtype.is_complex
    values = torch.tensor(EDGES if inexact else WHOLE_EDGES).to(dtype)
    return values.reshape([-1 if i == axis else 1 for i in range(dims)])
