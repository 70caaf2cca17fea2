"""The user's bucket policies: of dims marked on tensors, and by dim in the options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.bucket_policy import Bounded, BucketPolicy, JointPolicy
from dynaxla.bucketing.joint_policy import SharedBuckets
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.bucketing.size_expressions import Size, size_of
from dynaxla.errors import OptionError
from dynaxla.options import Buckets, BucketsByDim
from dynaxla.torch_api.dynamo import mark_dynamic
from dynaxla.torch_api.fakes import captured_value
from dynaxla.torch_api.symbols import example


@dataclass(frozen=True, slots=True)
class MarkedDims:
    """Policies of marked dims, by tensor (held weakly) and dim."""

    _policies: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def add(self, tensor: torch.Tensor, dim: int, policy: Bounded | None) -> None:
        """Marks a dim, so that Dynamo makes it symbolic at the first call. A size 0 or 1 still gets a graph of its own.

        Args:
            policy: the dim's buckets; None: those of the options.

        Raises:
            OptionError: the tensor has no such dim, or its size is outside of the policy's range.
        """
        rank = tensor.dim()
        if not -rank <= dim < rank:
            raise OptionError(f"the tensor has {rank} dims, so there is no dim {dim}", "name one of its dims")
        dim %= rank
        size = tensor.shape[dim]
        low, high = (0, None) if policy is None else (policy.min or 0, policy.max)
        if size < low or (high is not None and size > high):
            raise OptionError(
                f"dim {dim} has size {size}, outside of the sizes from {low} to {'any' if high is None else high}",
                "give an example of a size within the range",
            )
        if size > 1:
            mark_dynamic(tensor, dim)
        if policy is not None:
            self._policies.setdefault(tensor, {})[dim] = policy

    def of(self, tensor: torch.Tensor) -> Mapping[int, Bounded]:
        """The policies of a tensor's marked dims."""
        return self._policies.get(tensor, {})  # type: ignore[no-any-return]

    def policies(
        self, shapes: Sequence[tuple[Size, ...]], inputs: Sequence[object]
    ) -> dict[sympy.Symbol, BucketPolicy]:
        """The policies of the symbols of marked dims of a graph's inputs."""
        return {
            shape[dim]: policy
            for shape, value in zip(shapes, inputs, strict=True)
            if isinstance(value, torch.Tensor)
            for dim, policy in self.of(value).items()
            if isinstance(shape[dim], sympy.Symbol)
        }


def choose_policies(
    graph: Graph,
    inputs: Sequence[object],
    *,
    marks: MarkedDims,
    buckets: Buckets | None,
    declared: Mapping[int, BucketPolicy] | None,
    default: SymbolPolicies,
) -> SymbolPolicies:
    """Chooses the policies of a graph's symbols: marks first, then the options, then a warm-up's declarations, then defaults.

    Args:
        graph: as Dynamo captured it.
        inputs: the values of the first call.
        buckets: the option; "learned" and "fixed" begin with the default.
        declared: in a warm-up, the policies by the sizes of the example: a tensor after a graph break has no marks, so a size
            there that equals a declared size of the example gets its policy. A warm-up's sizes may be equal by chance, so equal
            symbols stay separate. None outside of a warm-up.
        default: the policies of all other symbols.

    Raises:
        OptionError: the options give one size two policies.
    """
    placeholders = graph.find_nodes(op="placeholder")
    shapes = tuple(_shape(captured_value(node)) for node in placeholders)
    results = tuple(_shape(captured_value(node)) for node in graph.output_node().all_input_nodes)
    marked = marks.policies(shapes, inputs)
    apart = declared is not None
    if buckets == "learned" or buckets == "fixed":
        buckets = None
    if isinstance(buckets, BucketPolicy):
        return SymbolPolicies(buckets, None, marked, (), shapes, apart)
    by_size = _by_size(declared, placeholders) if declared else {}
    by_dim = dict(_by_dim(buckets or {}, shapes))
    return replace(
        default,
        given={**by_size, **by_dim, **marked},
        together=tuple(_together(buckets or {}, shapes)),
        shapes=shapes,
        apart=apart,
        results=results,
    )


def _shape(value: object) -> tuple[Size, ...]:
    return tuple(map(size_of, value.shape)) if isinstance(value, torch.Tensor) else ()


def _by_size(declared: Mapping[int, BucketPolicy], placeholders: Sequence[Node]) -> dict[sympy.Symbol, BucketPolicy]:
    values = [captured_value(node) for node in placeholders]
    sizes: list[int | torch.SymInt] = [
        size for value in values if isinstance(value, torch.Tensor) for size in value.shape
    ]
    hints = {size_of(size): example(size) for size in sizes if isinstance(size, torch.SymInt)}
    return {
        symbol: declared[hint]
        for symbol, hint in hints.items()
        if isinstance(symbol, sympy.Symbol) and hint in declared
    }


def _by_dim(buckets: BucketsByDim, shapes: Sequence[tuple[Size, ...]]) -> Iterator[tuple[sympy.Symbol, BucketPolicy]]:
    """Yields the symbols to which the options give a policy by dim."""
    found: dict[sympy.Symbol, tuple[int, BucketPolicy]] = {}
    for shape in shapes:
        for dim, size in enumerate(shape):
            policy = buckets.get(dim)
            if not isinstance(policy, BucketPolicy) or not isinstance(size, sympy.Symbol):
                continue
            other, known = found.setdefault(size, (dim, policy))
            if known != policy:
                raise OptionError(
                    f"dims {other} and {dim} are the same size, and option 'buckets' gives them two policies",
                    "give both dims the same policy",
                )
            yield size, policy


def _together(
    buckets: BucketsByDim, shapes: Sequence[tuple[Size, ...]]
) -> Iterator[tuple[tuple[Size, ...], JointPolicy]]:
    """Yields each joint policy of the options with the sizes that it buckets: those of the first input that has its dims and
    a symbolic size among them."""
    for dims, policy in buckets.items():
        if isinstance(dims, int) or not isinstance(policy, JointPolicy):
            continue
        alike = [dim if isinstance(dim, tuple) else (dim,) for dim in dims]
        flat = [dim for together in alike for dim in together]
        filled = [tuple(shape[dim] for dim in flat) for shape in shapes if len(shape) > max(flat)]
        plain = [sizes for sizes in filled if all(isinstance(size, (int, sympy.Symbol)) for size in sizes)]
        varying = [sizes for sizes in plain if any(isinstance(size, sympy.Symbol) for size in sizes)]
        if varying:
            yield varying[0], policy if len(flat) == len(alike) else SharedBuckets(policy, tuple(map(len, alike)))
