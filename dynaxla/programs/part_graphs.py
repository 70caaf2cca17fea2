"""The graphs of a compiled part, and the static graphs made of them at one set of sizes or at one bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from dynaxla.bucketing.cropping import Cropping
from dynaxla.bucketing.pad_rule import PadRules
from dynaxla.bucketing.padded_graph import PaddedGraph, pad_graph
from dynaxla.bucketing.part_symbols import make_bucket_scheme
from dynaxla.bucketing.size_buckets import BucketScheme, PartBucket, SymbolPolicies
from dynaxla.cache.key import Key
from dynaxla.errors import PackageError
from dynaxla.fx.graph_utils import make_eager_function
from dynaxla.ops.table import OpTable
from dynaxla.programs.donation import donated_arguments
from dynaxla.programs.part_signature import PartIdentity, PartSignature, held_inputs
from dynaxla.programs.specialize import specialize
from dynaxla.programs.structural_hash import CannotList, graph_listing
from dynaxla.programs.weight_folding import WeightSplit, is_elementwise, split_weight_work
from dynaxla.torch_api.symbols import varies
from dynaxla.types import DEVICE_TYPE, Saved, StaticGraph


@dataclass(frozen=True, slots=True)
class _Cut:
    """The graph of a part, and the same cut in two: the work on weights alone, and the rest."""

    module: GraphModule
    split: WeightSplit


class PartGraphs:
    """The graphs of one part: the work on weights alone, and the rest, which is specialized to the sizes of calls.

    Args:
        module: a functional graph with `meta["val"]` on every node; its last placeholders are the constants.
        weights: positions of the inputs that keep their values between most calls.
        constants: values of the last placeholders, which never change.
        fold: whether the work on weights alone is split off.
        pads: the pad rules of ops.
        saved: the outputs of a forward that its backward alone reads.
    """

    def __init__(
        self,
        module: GraphModule,
        weights: Sequence[int],
        constants: Sequence[torch.Tensor],
        fold: bool,
        pads: PadRules,
        saved: Saved = Saved(),  # noqa: B008 (a frozen value)
    ) -> None:
        placeholders = _placeholders(module)
        packs = fold and _may_pack(module, weights, saved)
        split = split_weight_work(module, held_inputs(placeholders, weights, constants), fold, packs)
        facts = PartSignature.of(placeholders, weights, constants, split, saved)
        self._set(facts, None, fold, pads, _Cut(module, split))

    @classmethod
    def later(cls, facts: PartSignature, known: PartIdentity, fold: bool, read: Callable[[], PartGraphs]) -> PartGraphs:
        """The graphs of a part that another process described. They are read when something needs more than the description.

        Args:
            facts, known: the description.
            read: reads the graphs.
        """
        made = cls.__new__(cls)
        made._set(facts, known, fold, {}, None)
        made._read = read
        return made

    def _set(
        self, facts: PartSignature, known: PartIdentity | None, fold: bool, pads: PadRules, cut: _Cut | None
    ) -> None:
        self.facts = facts
        self.weights, self.constants, self.saved, self.sizes = facts.weights, facts.constants, facts.saved, facts.sizes
        self._known = known
        self._fold = fold
        self._pads = pads
        self._cut = cut
        self._read: Callable[[], PartGraphs] | None = None
        self._sized: tuple[SymbolPolicies, BucketScheme | None] | None = None
        self._in_eager: dict[bool, Callable[[Sequence[Any]], list[Any]]] = {}

    @property
    def are_known(self) -> bool:
        """Whether another process described the part, so that its calls do not need the graphs."""
        return self._known is not None

    @property
    def _graphs(self) -> _Cut:
        """
        Raises:
            PackageError: the graphs that were read are those of another part.
        """
        if self._cut is None:
            assert self._read is not None
            read = self._read()
            if (read.facts, read.name) != (self.facts, self.name):
                raise PackageError("a graph is another one than what was saved with it", "save it anew")
            self._cut, self._pads = read._cut, read._pads
            assert self._cut is not None
        return self._cut

    @property
    def module(self) -> GraphModule:
        """The graph of the whole part, with symbolic sizes, as a module."""
        return self._graphs.module

    @property
    def graph(self) -> Graph:
        """The graph of the whole part, with symbolic sizes."""
        return self.module.graph

    @property
    def fold(self) -> Graph | None:
        """The graph of the work on weights alone, or None; `main` is the rest."""
        return self._graphs.split.fold

    @property
    def main(self) -> Graph:
        """The graph of the part without the work on weights alone, with symbolic sizes."""
        return self._graphs.split.main.graph

    @cached_property
    def name(self) -> str | None:
        """A digest of everything that determines the part's programs but the ops' records, the same in every process.

        None if the graph has no listing.
        """
        if self._known is not None:
            return self._known.name
        try:
            listing = graph_listing(self.graph)
        except CannotList:
            return None
        facts = self.facts
        about = {"weights": facts.weights, "constants": len(facts.constants), "fold": self._fold, "saved": facts.saved}
        if facts.donations:
            about["donations"] = sorted(facts.donations.items())
        if self._graphs.split.packs:
            about["packs"] = self._graphs.split.packs
        return Key.of(graph=listing, **about).digest

    def is_named_by(self, table: OpTable) -> bool:
        """Whether the name determines what programs compute, with the records of a table."""
        return self._known is not None or table.have_known_names(node.target for node in self.graph.nodes)

    def identify(self, policies: SymbolPolicies, table: OpTable) -> PartIdentity | None:
        """What another process needs of the part beside its signature; None if no name determines its programs."""
        if self.name is None or not self.is_named_by(table):
            return None
        return PartIdentity(self.name, self.find_bucket_scheme(policies))

    def find_bucket_scheme(self, policies: SymbolPolicies) -> BucketScheme | None:
        """Where the sizes that vary are read, and their buckets; None if a size does not follow from one input's size.

        Args:
            policies: of the part's graph.
        """
        if self._known is not None:
            return self._known.scheme
        if self._sized is None or self._sized[0] is not policies:
            origins = [origin if isinstance(origin, int) else None for origin in self.facts.origins]
            self._sized = policies, make_bucket_scheme(self._graphs.split.main.graph, origins, policies, self._pads)
        return self._sized[1]

    def run_eager(self, args: Sequence[Any], *, in_transforms: bool = False) -> list[Any]:
        """Computes the part's outputs in eager PyTorch; of arguments that transforms wrap, if it is told so."""
        if in_transforms not in self._in_eager:
            self._in_eager[in_transforms] = make_eager_function(self.module, self.saved, in_transforms=in_transforms)
        return self._in_eager[in_transforms]([*args, *self.constants])

    def specialize(self, args: Sequence[Any]) -> StaticGraph:
        """The static graph of the part at the sizes of these arguments."""
        graph = self._graphs.split.main.graph
        returned = graph.output_node().args[0]
        count = len(returned) if isinstance(returned, (tuple, list)) else 1
        strided = frozenset(range(count)) - self.saved.outputs
        return specialize(graph, self._example_arguments(args) if self.sizes else None, strided)

    def specialize_fold(self) -> Graph | None:
        """The static graph of the work on weights alone, or None."""
        fold = self.fold
        return None if fold is None else specialize(fold, None).graph

    def pad(
        self, buckets: PartBucket, order: Sequence[sympy.Symbol]
    ) -> tuple[StaticGraph, tuple[tuple[int, ...] | None, ...], Cropping]:
        """The static graph of the part at a bucket, the padded shapes of its free tensors, and the true sizes of its outputs.

        Args:
            order: of the symbols in a call's values.

        Raises:
            CannotPad: padding could change a result.
        """
        free, padded = self.facts.free, self.pad_symbolic(buckets)
        cropping = Cropping.of(padded, order)
        return specialize(padded.graph, None), padded.padded[-len(free) :] if free else (), cropping

    def pad_symbolic(self, buckets: PartBucket) -> PaddedGraph:
        """The padded graph at a bucket, with its masks.

        Raises:
            CannotPad: padding could change a result.
        """
        main = self._graphs.split.main
        return pad_graph(main.graph, buckets, _device(main), self._pads, self.saved.outputs)

    def find_donations(self, static: StaticGraph) -> tuple[tuple[int, int], ...]:
        """The arguments of a program whose memory it may take, each with the result that is its new value."""
        first = len(self.facts.origins) - len(self.facts.free)
        return donated_arguments(static, {first + i: place for i, place in self.facts.donations.items()})

    def _example_arguments(self, args: Sequence[Any]) -> list[Any]:
        return [
            args[origin] if isinstance(origin, int) else node.meta["val"]
            for origin, node in zip(self.facts.origins, _placeholders(self._graphs.split.main), strict=True)
        ]


def _placeholders(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _may_pack(module: GraphModule, weights: Sequence[int], saved: Saved) -> bool:
    """Whether small weights may be packed into one argument: only on the device, in inference, in an elementwise part.

    Every write to a weight packs again, and a weight of the host counts as written at every call. Packed values have no pad
    rules. Beside matrix products an argument's time does not count, and XLA compiles fusions anew that differ in their offsets
    in a pack alone: a BERT of 12 layers takes 6 s instead of 4.6.
    """
    placeholders = _placeholders(module)
    values = [node.meta["val"] for node in placeholders]
    fixed = all(isinstance(value, torch.Tensor) and not varies(value) for value in values)
    here = all(values[i].device.type == DEVICE_TYPE for i in weights)
    return not saved.in_training and fixed and here and is_elementwise(module.graph)


def _device(module: GraphModule) -> torch.device:
    values = [n.meta.get("val") for n in module.graph.nodes]
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
