"""Nested arguments as flat lists. torch has no public API for this; relies on torch.utils._pytree."""

from __future__ import annotations

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
