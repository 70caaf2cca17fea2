"""A call of a higher-order operator as a function of tensors and sizes, and its forms: one more for each bucket of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.types import IntLikeType

from dynaxla.cache.key import Key
from dynaxla.custom_ops.reversed_scan import REVERSED_SCAN
from dynaxla.partition.inline_subgraphs import INVOKE
from dynaxla.programs.structural_hash import CannotList, graph_listing
from dynaxla.torch_api.overloads import HigherOrderOperator
from dynaxla.torch_api.pytree import TreeSpec, tree_flatten, tree_unflatten

aten = torch.ops.aten
_higher_order = torch.ops.higher_order
_SCANS = (_higher_order.scan, REVERSED_SCAN)


@dataclass(frozen=True, slots=True)
class Operand:
    """Placeholder for the next tensor, or the next size, of a call."""

    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A higher-order operator and its sub-graphs, as a function of tensors and sizes.

    Attributes:
        target: the operator.
        leaves: its flattened arguments; an `Operand` stands for each tensor and each size.
        tree: the tree spec that unflattens `leaves`.
    """

    target: HigherOrderOperator
    leaves: tuple[object, ...]
    tree: TreeSpec

    @classmethod
    def of(
        cls, target: HigherOrderOperator, args: Sequence[object], find_graph: Callable[[object], GraphModule | None]
    ) -> tuple[Region, list[Node], list[Node]]:
        """Returns a call as a region, with the tensors and sizes of the call.

        Args:
            args: the call's arguments.
            find_graph: returns the sub-graph that an argument is, else None.
        """
        flat, tree = tree_flatten(tuple(args))
        leaves: list[object] = []
        tensors: list[Node] = []
        sizes: list[Node] = []
        for x in flat:
            graph = find_graph(x)
            if graph is not None or not isinstance(x, Node):
                leaves.append(x if graph is None else graph)
                continue
            is_tensor = isinstance(x.meta.get("val"), Tensor)
            (tensors if is_tensor else sizes).append(x)
            leaves.append(Operand(is_tensor))
        if target is INVOKE:
            leaves[1] = ""  # the name of the sub-graph, which may differ between calls of the same sub-graph
        return cls(target, tuple(leaves), tree), tensors, sizes

    @property
    def key(self) -> object:
        """Hashable key, equal for calls of the same sub-graphs."""
        return self.target, tuple(id(x) if isinstance(x, GraphModule) else repr(x) for x in self.leaves), str(self.tree)

    @property
    def digest(self) -> str:
        """Digest of what it computes, the same in every process; empty if there is none, as a sub-graph holds some tensors."""
        try:
            leaves = [graph_listing(x.graph) if isinstance(x, GraphModule) else x for x in self.leaves]
            return f"of_{Key.of(call=self.target.name(), leaves=leaves, tree=str(self.tree)).digest[:32]}"
        except (CannotList, TypeError):
            return ""

    @property
    def graphs(self) -> list[GraphModule]:
        """Returns the sub-graphs."""
        return [x for x in self.leaves if isinstance(x, GraphModule)]

    def arguments(self, tensors: Sequence[object], sizes: Sequence[object]) -> tuple[Any, ...]:
        """Returns the operator's arguments for these tensors and sizes."""
        left, plain = iter(tensors), iter(sizes)
        leaves = [(next(left) if x.is_tensor else next(plain)) if isinstance(x, Operand) else x for x in self.leaves]
        args: tuple[Any, ...] = tree_unflatten(leaves, self.tree)
        return args

    @property
    def carried(self) -> int:
        """How many results a loop over places carries from place to place; the others have a value of each place."""
        return len(self.arguments(*self._numbers())[1]) if self.target in _SCANS else 0

    @property
    def scanned(self) -> range:
        """Which tensors a loop over places reads one place at a time; none of another operator's."""
        if self.target not in (*_SCANS, _higher_order.map_impl):
            return range(0)
        read = self.arguments(*self._numbers())[-2]
        return range(read[0], read[-1] + 1)

    def _numbers(self) -> tuple[range, range]:
        operands = [x for x in self.leaves if isinstance(x, Operand)]
        tensors = sum(x.is_tensor for x in operands)
        return range(tensors), range(len(operands) - tensors)

    def run_eager(self, tensors: Sequence[Tensor], sizes: Sequence[int], places: Tensor | None) -> list[Tensor]:
        if places is None:
            return list(self.target(*self.arguments(tensors, sizes)))
        most, count = tensors[self.scanned[0]].shape[0], int(places)
        read = [x[:count] if index in self.scanned else x for index, x in enumerate(tensors)]
        results = self.run_eager(read, sizes, None)
        padding = (x.new_zeros(most - count, *x.shape[1:]) for x in results[self.carried :])
        return [*results[: self.carried], *map(torch.cat, zip(results[self.carried :], padding, strict=True))]

    def run_fake(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Returns fake results for fake tensors."""
        return [torch.empty_like(x) for x in _FAKE_KERNELS[self.target](*self.arguments(tensors, sizes))]


class RegionForms:
    """The forms of a region, by name: as it was captured, with the name "", and one for each bucket that it was padded to.

    Its methods are the kernels of the region's operator, of which the form is an argument.
    """

    def __init__(self, captured: Region) -> None:
        self.captured = captured
        self._forms = {"": captured}

    def __getitem__(self, form: str) -> Region:
        return self._forms[form]

    def add(self, region: Region) -> str:
        """Returns the name of a form: a digest of what it computes, or one that no other process finds."""
        form = region.digest or uuid4().hex
        self._forms.setdefault(form, region)
        return form

    def run_eager(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], places: Tensor | None = None, form: str = ""
    ) -> list[Tensor]:
        return self[form].run_eager(tensors, sizes, places)

    def run_fake(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], places: Tensor | None = None, form: str = ""
    ) -> list[Tensor]:
        return self[form].run_fake(tensors, sizes)


class _FakeRun(Interpreter):
    """Runs a sub-graph on fake tensors, and likewise the calls in it that have sub-graphs: torch's own make unknown sizes."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        kernel = _FAKE_KERNELS.get(target)
        if kernel is not None:
            return kernel(*args)
        # A view is a reshape of row-major values, as in bucketing/padded_graph_builder.py.
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


def _run_fake(module: GraphModule, *args: object) -> Any:
    return _FakeRun(module).run(*args)


def _fake_scan(
    combine: GraphModule,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    more: Sequence[Tensor | IntLikeType],
    places: Tensor | None = None,
) -> list[Tensor]:
    results = _run_fake(combine, *init, *(x[0] for x in xs), *more)
    stacked = [x.new_empty([xs[0].shape[0], *x.shape]) for x in results[len(init) :]]
    return [*results[: len(init)], *stacked]


_FAKE_KERNELS: Mapping[Any, Callable[..., Sequence[Tensor]]] = MappingProxyType(
    {
        _higher_order.cond: lambda pred, true, false, operands: _run_fake(true, *operands),
        _higher_order.while_loop: lambda cond, body, carried, more: carried,
        **dict.fromkeys(_SCANS, _fake_scan),
        _higher_order.map_impl: lambda body, xs, more, places=None: _fake_scan(body, (), xs, more),
        _higher_order.invoke_subgraph: lambda called, name, *operands: _run_fake(called, *operands),
    }
)
