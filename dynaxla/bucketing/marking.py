"""Dims that a user says will vary, and the policies of their buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.bucketing.policy import BucketPolicy
from dynaxla.bucketing.sizes import size_of
from dynaxla.errors import OptionError


@dataclass(frozen=True, slots=True)
class Marks:
    """Policies by tensor and dim. Holds no tensor alive."""

    _policies: Any = field(default_factory=WeakIdKeyDictionary)

    def add(self, tensor: torch.Tensor, dim: int, policy: BucketPolicy, low: int | None, high: int | None) -> None:
        """Marks a dim: Dynamo makes it symbolic at the first call.

        Raises:
            OptionError: there is no such dim, or the range is empty or does not hold the tensor's own size.
        """
        rank = tensor.dim()
        if not -rank <= dim < rank:
            raise OptionError(f"the tensor has {rank} dims, so there is no dim {dim}", "name one of its dims")
        dim %= rank
        size = tensor.shape[dim]
        if not (low or 2) <= size <= (high or size):
            raise OptionError(
                f"dim {dim} has size {size}, outside of the sizes from {low or 2} to {high or 'any'}",
                "sizes 0 and 1 become graphs of their own: give an example of another size within the range",
            )
        torch._dynamo.mark_dynamic(tensor, dim, min=low, max=high)
        self._policies.setdefault(tensor, {})[dim] = policy

    def policies(self, placeholders: Sequence[Node], inputs: Sequence[Any]) -> dict[sympy.Symbol, BucketPolicy]:
        """The policies of the symbols that Dynamo made for marked dims of a graph's inputs."""
        found: dict[sympy.Symbol, BucketPolicy] = {}
        for node, value in zip(placeholders, inputs, strict=True):
            marked = self._policies.get(value, {}) if isinstance(value, torch.Tensor) else {}
            for dim, policy in marked.items():
                size = size_of(node.meta["example_value"].shape[dim])
                if isinstance(size, sympy.Symbol):
                    found[size] = policy
        return found
